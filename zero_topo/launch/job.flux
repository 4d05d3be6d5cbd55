#!/bin/bash
# Written by zero-topo launch for $target: $nodes nodes x $on_node = $ranks ranks.
$about# flux: --job-name=zero-topo
# flux: --output={{name}}-{{id}}.out
$asked# flux: --nodes=$nodes
# Whole nodes (Flux documentation, flux-batch):
# flux: --exclusive
$resources
set -eo pipefail
$software
# -- Rendezvous: this script runs on the first node of the job, which is that of rank 0.
${address}MASTER_PORT=$${MASTER_PORT:-3442}
export MASTER_ADDR MASTER_PORT
$variables
# -- Kernels: compiled on this node if the cache lacks them. All ranks load them from the cache.
python -m zero_topo.cli build || true

# -- Ranks. The worker sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE from Flux's variables.
options=(
  --nodes=$nodes
  # Ranks node by node, so that neighbours share a package and then a node (Flux documentation, flux-environment).
  --tasks-per-node=$on_node
  --exclusive
  # One rank that fails ends the others, which would wait (Flux documentation, flux-run).
  -oexit-on-error
  # Every rank sees all GPUs of the node and takes number LOCAL_RANK, as DeepSpeed does; otherwise Flux hides those that
  # the job did not ask for (Flux documentation, flux-environment).
  -ogpu-affinity=off
$step)
flux run "$${options[@]}" python -m zero_topo.launch.worker -- \
  $command
