#!/bin/sh
# Runs `loramux` with the arguments of the container or, with the argument `ray-node`, the command with which KubeRay
# starts a node of a Ray cluster.
#
# numba loads compiled kernels only from a directory that it can write to, and the image may be mounted read-only. The
# kernels compiled in the image are therefore copied into the volume once. The directory's name contains the hash of the
# kernels' sources, so a new image never uses old code. On a CPU that differs from the builder's, numba compiles them
# again into the same directory.
set -eu
umask 077
for compiled in /opt/loramux/lib/python3*/site-packages/loramux/kernels/cpu/__pycache__/numba-*; do
    [ -d "$compiled" ] || continue # the CUDA image
    NUMBA_CACHE_DIR=/var/lib/loramux/kernels/$(basename "$compiled")
    export NUMBA_CACHE_DIR
    if [ ! -d "$NUMBA_CACHE_DIR" ]; then
        mkdir -p /var/lib/loramux/kernels
        copy=$(mktemp -d /var/lib/loramux/kernels/copy-XXXXXX)
        cp -R -p "$compiled/." "$copy"
        mv -T "$copy" "$NUMBA_CACHE_DIR" 2>/dev/null || rm -rf "$copy" # another container on this volume was faster
    fi
done
if [ "${1:-}" = ray-node ]; then
    exec sh -c "exec $KUBERAY_GEN_RAY_START_CMD"
fi
exec loramux "$@"
