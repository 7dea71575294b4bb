#!/bin/sh
# Certificates for tests, a laboratory, or a network of your own; where there is an authority already, use it instead.
#
#   deploy/make_certificates.sh authority                    an authority of ten years: certificates/ca.pem, ca-key.pem
#   deploy/make_certificates.sh server NAME|ADDRESS...       what compose mounts, in secrets/: cert.pem, key.pem, ca.pem,
#                                                            client-ca.pem, and probe.pem, probe-key.pem for the health
#                                                            check; localhost and 127.0.0.1 are always in the certificate
#   deploy/make_certificates.sh renew NAME|ADDRESS...        the same with new keys, put in the place of the old ones
#   deploy/make_certificates.sh client PRINCIPAL...          certificates/PRINCIPAL.pem, PRINCIPAL-key.pem
#
# Variables: CERTIFICATES (folder of the authority and clients: certificates), SECRETS (folder of the server: secrets),
# DAYS (how long servers and clients are valid: 90), SERVER_UID (who reads the server's keys: 10001, as in the image).
# No key is ever overwritten but by renew. Keep ca-key.pem off the machine that serves: who has it can let anybody in.
set -eu
umask 077

CERTIFICATES=${CERTIFICATES:-certificates}
SECRETS=${SECRETS:-secrets}
DAYS=${DAYS:-90}
SERVER_UID=${SERVER_UID:-10001}

fail() {
    echo "error: $*" >&2
    exit 2
}

usage() {
    sed -n '4,9s/^# *//p' "$0" >&2
    exit 2
}

refuse_to_overwrite() {
    for path; do
        [ ! -e "$path" ] || fail "$path exists; it is left as it is"
    done
}

# quietly COMMAND...: its output is shown only when it fails
quietly() {
    "$@" >"$work/output" 2>&1 || { cat "$work/output" >&2; fail "openssl did not do it"; }
}

make_key() {
    quietly openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"
}

# make_config NAME EXTENSION...: a configuration of openssl for one subject, in $work/config
make_config() {
    subject=$(printf '%.64s' "$1") # the field has no more room; host names stand in subjectAltName as a whole
    shift
    {
        printf '[req]\ndistinguished_name = subject\nprompt = no\nutf8 = yes\nstring_mask = utf8only\n'
        printf '[subject]\nCN = %s\n[extensions]\n' "$subject"
        printf '%s\n' "$@"
    } >"$work/config"
}

# sign NAME KEY CERTIFICATE EXTENSION...: signed by the authority
sign() {
    name=$1 key=$2 certificate=$3
    shift 3
    make_config "$name" "$@" "basicConstraints = critical, CA:FALSE" "keyUsage = critical, digitalSignature" \
        "subjectKeyIdentifier = hash" "authorityKeyIdentifier = keyid"
    quietly openssl req -new -sha256 -config "$work/config" -key "$key" -out "$work/request"
    serial=0x$(openssl rand -hex 16 | sed 's/^./1/')
    quietly openssl x509 -req -sha256 -in "$work/request" -CA "$CERTIFICATES/ca.pem" -CAkey "$CERTIFICATES/ca-key.pem" \
        -set_serial "$serial" -days "$DAYS" -extfile "$work/config" -extensions extensions -out "$certificate"
}

need_authority() {
    [ -e "$CERTIFICATES/ca-key.pem" ] || fail "no $CERTIFICATES/ca-key.pem; first: $0 authority"
}

make_authority() {
    refuse_to_overwrite "$CERTIFICATES/ca-key.pem" "$CERTIFICATES/ca.pem"
    mkdir -p "$CERTIFICATES"
    make_key "$work/ca-key.pem"
    make_config "Ferrule $(date +%Y-%m-%d) $(openssl rand -hex 4)" "basicConstraints = critical, CA:TRUE, pathlen:0" \
        "keyUsage = critical, keyCertSign, cRLSign" "subjectKeyIdentifier = hash"
    quietly openssl req -new -x509 -sha256 -config "$work/config" -extensions extensions -key "$work/ca-key.pem" \
        -days 3650 -out "$work/ca.pem"
    mv "$work/ca-key.pem" "$work/ca.pem" "$CERTIFICATES/"
    echo "$CERTIFICATES/ca.pem"
}

# names_of NAME|ADDRESS...: as the extension subjectAltName lists them
names_of() {
    list=DNS:localhost,IP:127.0.0.1,IP:::1
    for name; do
        case $name in
        localhost | 127.0.0.1 | ::1) ;;
        '' | *[!A-Za-z0-9.:*-]*) fail "'$name' is neither a host name nor an address" ;;
        *:* | *[!0-9.]*.*[!0-9.]* | *[!0-9.]*) list=$list,$(case $name in *:*) echo IP ;; *) echo DNS ;; esac):$name ;;
        *) list=$list,IP:$name ;;
        esac
    done
    echo "$list"
}

# put FILE NAME: in the server's folder; no reader sees half of it, since a rename within one folder is at once
put() {
    cp "$1" "$SECRETS/.$2.new"
    give_to_server "$SECRETS/.$2.new"
    mv -f "$SECRETS/.$2.new" "$SECRETS/$2"
}

# In the image the server is a user of its own; only root can hand files to it.
give_to_server() {
    [ "$(id -u)" != 0 ] || chown "$SERVER_UID" "$1"
}

# check_trust AUTHORITIES CERTIFICATE: what those who have these authorities would refuse is not put in place
check_trust() {
    openssl verify -CAfile "$1" "$2" >/dev/null 2>&1 ||
        fail "$1 does not trust $CERTIFICATES/ca.pem; add that to it first, behind what it has"
}

make_server() {
    need_authority
    [ $# -gt 0 ] || set -- localhost
    names=$(names_of "$@")
    make_key "$work/key.pem"
    sign "$1" "$work/key.pem" "$work/cert.pem" "subjectAltName = $names" "extendedKeyUsage = serverAuth"
    make_key "$work/probe-key.pem"
    sign probe "$work/probe-key.pem" "$work/probe.pem" "extendedKeyUsage = clientAuth"
    mkdir -p "$SECRETS"
    for name in ca client-ca; do
        [ -e "$SECRETS/$name.pem" ] || put "$CERTIFICATES/ca.pem" "$name.pem"
    done
    check_trust "$SECRETS/ca.pem" "$work/cert.pem"
    check_trust "$SECRETS/client-ca.pem" "$work/probe.pem"
    for name in key cert probe-key probe; do
        put "$work/$name.pem" "$name.pem"
    done
    give_to_server "$SECRETS"
    echo "$SECRETS/cert.pem for $names"
    [ "$(id -u)" = 0 ] || [ "$(id -u)" = "$SERVER_UID" ] || cat <<TEXT
The keys belong to you alone; the server in the image is uid $SERVER_UID. Give them to it:
  sudo chown -R $SERVER_UID $SECRETS        or, without root:  setfacl -R -m u:$SERVER_UID:rX $SECRETS
TEXT
}

make_client() {
    need_authority
    [ $# -gt 0 ] || usage
    for principal; do
        [ ${#principal} -le 64 ] || fail "'$principal' is longer than 64 characters"
        case $principal in
        '' | .* | *[!A-Za-z0-9._~@+-]*) fail "'$principal': a principal is made of letters, digits and ._~@+-" ;;
        ca | ca-key) fail "'$principal' is the authority's file" ;;
        esac
        refuse_to_overwrite "$CERTIFICATES/$principal-key.pem" "$CERTIFICATES/$principal.pem"
        make_key "$work/key.pem"
        sign "$principal" "$work/key.pem" "$work/cert.pem" "extendedKeyUsage = clientAuth"
        mv "$work/key.pem" "$CERTIFICATES/$principal-key.pem"
        mv "$work/cert.pem" "$CERTIFICATES/$principal.pem"
        echo "$CERTIFICATES/$principal.pem"
    done
}

command -v openssl >/dev/null || fail "openssl is not installed"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
[ $# -gt 0 ] || usage
action=$1
shift
case $action in
authority) make_authority ;;
server)
    refuse_to_overwrite "$SECRETS/key.pem" "$SECRETS/cert.pem" "$SECRETS/probe-key.pem" "$SECRETS/probe.pem"
    make_server "$@"
    ;;
renew) make_server "$@" ;;
client) make_client "$@" ;;
*) usage ;;
esac
