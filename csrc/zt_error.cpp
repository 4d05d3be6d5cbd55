/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels' status codes mean, for the CPU and the GPU builds.
 */
#include "zt_kernels.h"

extern "C" const char *zt_error_text(int status) {
    switch (status & 255) {
        case ZT_OK:
            return "no error";
        case ZT_BAD_SPEC:
            return "the wire format knows no such bits or block size, or the two formats do not fit together";
        case ZT_BAD_DTYPE:
            return "the dtype is none of FP32, FP16 and BF16";
        case ZT_BAD_SIZE:
            return "a size is negative, or a message does not have the bytes that its values take";
        case ZT_BAD_RANGE:
            return "the range leaves the work, or does not begin and end where it may";
        case ZT_BAD_LEVEL:
            return "this processor or this build lacks the instructions asked for";
        case ZT_NO_TABLE:
            return "more pieces than travel with a launch, and no table of them";
        case ZT_BAD_ALIGNMENT:
            return "a quantized message does not begin at a multiple of 16 bytes, or a cast one of a value's size";
        case ZT_LAUNCH_FAILED:
            return "the GPU refused the launch";
        default:
            return "an unknown error";
    }
}
