#!/bin/sh
# Installs what `make test-stack` runs beside Python: on Debian as root; elsewhere it says what is missing.
set -eu
missing=
packages=
need() { # PROGRAM PACKAGE
    command -v "$1" >/dev/null && return
    missing="$missing $1"
    packages="$packages $2"
}
need promtool prometheus
need prometheus prometheus
need openssl openssl
need wget wget
need chromium chromium
need npx npm
need shellcheck shellcheck
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing$packages"
    # shellcheck disable=SC2086  # words
    apt-get install -y -q $packages >/dev/null
else
    echo "error: missing:$missing; on Debian, as root: apt install$packages" >&2
    exit 2
fi
