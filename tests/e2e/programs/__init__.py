# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
