#!/usr/bin/env bash
# Installs from nothing as deploy/systemd/README.md says, with a folder in place of /, and says after how many seconds
# the console's API has the first grant, and Prometheus the first alarm. There is no init system: it runs the commands
# of the units by hand, as the units' users. It needs root.
set -euo pipefail
root=$(mktemp -d)
chmod 755 "$root"
running=()
trap 'kill "${running[@]}" 2>/dev/null || true; wait; rm -rf "$root"' EXIT
prometheus=$(PYTHONPATH=tests python3 -m tools prometheus | sed -n 's/^prometheus: //p')
SECONDS=0

say() { echo "$SECONDS s: $*"; }

within() { # until a command succeeds, for at most some minutes
	local end=$((SECONDS + 300))
	until eval "$1" >/dev/null 2>&1; do
		((SECONDS < end)) || { echo "this did not come: $1"; tail -n 20 "$root"/*.log; exit 1; }
		sleep 0.1
	done
}

id_of() { awk -F: -v name="$1" '$1 == name { print $3 }' "$root/etc/$2"; }

as() { # a user of the scratch root; replaces this shell
	cd /
	exec env --ignore-environment PATH=/usr/bin:/bin RUNTIME_DIRECTORY="$root/run/outfitter" \
		setpriv --reuid "$(id_of "$1" passwd)" --regid "$(id_of outfitter group)" --clear-groups --no-new-privs \
		bash -c 'umask 0007; exec "$@"' - "${@:2}"
}

command_of() { # a unit's, with the scratch root before its paths
	sed -n 's/^ExecStart=//p' "$root/etc/systemd/system/$1" |
		sed "s#/opt/outfitter#$root&#; s# /etc/outfitter# $root/etc/outfitter#; s/%i/scorer-1/g; s#\$COMMAND#/bin/sleep 600#"
}

# --- Install

/usr/bin/python3 -m venv "$root/opt/outfitter"
"$root/opt/outfitter/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r constraints-service.txt
"$root/opt/outfitter/bin/pip" install --quiet --disable-pip-version-check --no-deps --no-build-isolation .
say "the program is installed"
install -D -m 0644 deploy/systemd/sysusers.conf "$root/etc/sysusers.d/outfitter.conf"
install -D -m 0644 deploy/systemd/tmpfiles.conf "$root/etc/tmpfiles.d/outfitter.conf"
install -D -m 0644 -t "$root/etc/systemd/system" deploy/systemd/outfitter*.service
systemd-sysusers --root="$root" outfitter.conf 2>/dev/null
mkdir -p "$root/var/lib" "$root/etc/outfitter" "$root/devices" # every machine has the first one
systemd-tmpfiles --root="$root" --create outfitter.conf
[ "$(stat --format=%a "$root/var/lib/outfitter")" = 2770 ]
install -d -o "$(id_of outfitter passwd)" -g "$(id_of outfitter group)" "$root/run/outfitter" # RuntimeDirectory=
echo model=X1 >"$root/devices/gpu0"
cat >"$root/etc/outfitter/outfitter.toml" <<END
bus = "sqlite:///$root/var/lib/outfitter/bus.db"
host = "from-nothing"
http = "127.0.0.1:0"
api = true
external-resources = ["gpu"]
[external-resource.gpu]
amount = 1
driver = "files"
param.path = "$root/devices"
END
(as outfitter "$root/opt/outfitter/bin/outfitter" doctor --config "$root/etc/outfitter/outfitter.toml")
say "the doctor has no complaint"

# --- the first grant

# shellcheck disable=SC2046 # the words of a unit's command
(as outfitter $(command_of outfitter.service)) >"$root/manager.log" 2>&1 &
running+=($!)
within "grep -q 'metrics at' $root/manager.log"
url=$(grep -o 'http://127.0.0.1:[0-9]*' "$root/manager.log" | head -n 1)
within "curl -sf $url/readyz"
say "the manager is ready"
# shellcheck disable=SC2046
(as outfitter-worker $(command_of outfitter-run@.service)) >"$root/worker.log" 2>&1 &
running+=($!)
within "curl -s '$url/api/v1/workers?state=allocated' | grep scorer-1"
curl -sf "$url/console/" >/dev/null
say "the first grant is in the API that the console reads"

# --- the first alarm

sed "s#127.0.0.1:9477#${url#http://}#" deploy/prometheus/prometheus.yml >"$root/prometheus.yml"
cp deploy/prometheus/rules.yml "$root"
port=$(/usr/bin/python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$prometheus" --config.file="$root/prometheus.yml" --storage.tsdb.path="$root/data" \
	--web.listen-address="127.0.0.1:$port" --log.level=warn >"$root/prometheus.log" 2>&1 &
running+=($!)
within "curl -s 'http://127.0.0.1:$port/api/v1/query?query=outfitter_ready' | grep '\"1\"'"
say "Prometheus has scraped the manager"
"$root/opt/outfitter/bin/python" - "sqlite:///$root/var/lib/outfitter/bus.db" <<'END'
import sys

import anyio

from outfitter_proto import bus, names


async def send_nonsense() -> None:
    async with bus.connect(sys.argv[1]) as connection:
        await connection.publish(names.topics("outfitter").registrations, 0, bus.Entry(b"from-nothing", b"nonsense"))


anyio.run(send_nonsense)
END
within "curl -s http://127.0.0.1:$port/api/v1/alerts | grep '\"state\":\"firing\"'"
say "the first alarm fires: $(curl -s "http://127.0.0.1:$port/api/v1/alerts" | grep -o 'Outfitter[A-Za-z]*' | head -n 1)"
