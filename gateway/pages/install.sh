#!/bin/sh
# Installs capsule, the command line of this service, for the user who runs it. It needs Python 3.11 or newer and PyPI.
#
#   curl -fsSL __URL__/install.sh | sh             Run it again to update.
#   curl -fsSL __URL__/install.sh | sh -s mcp      Also installs what `capsule mcp` needs.
#
# It creates a virtual environment in ~/.local/share/capsule/environment, and a link to its program, ~/.local/bin/capsule.
# To remove the command line, delete both.
set -eu

service=__URL__
wheel=__WHEEL__
package="capsule-gateway${1:+[$1]} @ $wheel"
environment=${XDG_DATA_HOME:-$HOME/.local/share}/capsule/environment
programs=$HOME/.local/bin

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

find_python() {
    for python in python3 python3.14 python3.13 python3.12 python3.11; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && return
    done
    fail "capsule needs Python 3.11 or newer."
}

# In a function, so that a shell that got only a part of this file runs nothing.
install() {
    find_python
    if [ -e "$programs/capsule" ] && [ "$(readlink "$programs/capsule")" != "$environment/bin/capsule" ]; then
        fail "$programs/capsule is another program. Move it away first."
    fi
    if ! "$environment/bin/python" -m pip --version >/dev/null 2>&1; then
        "$python" -m venv --clear "$environment" ||
            fail "capsule needs Python's venv module. On Debian and Ubuntu: apt install python3-venv"
    fi
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "$package"
    mkdir -p "$programs"
    ln -sf "$environment/bin/capsule" "$programs/capsule"
    echo "Installed $programs/capsule."
    case ":$PATH:" in
    *":$programs:"*) ;;
    *) echo "Add its folder to your PATH: export PATH=\"$programs:\$PATH\"" ;;
    esac
    echo "Next: capsule login --url $service"
}

install
