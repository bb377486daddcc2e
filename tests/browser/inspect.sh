#!/bin/sh
# Opens the page of `moesaic inspect --html` in headless Chromium at 420 and 1400 pixels, moves its
# slider, and fails if something is wider than the screen, if the wide one cuts the table of
# launches, if the console has an error, or if the slider changes nothing. Screenshots stay in the
# folder given, to be looked at.
#
#   tests/browser/inspect.sh target/debug/moesaic screenshots [inspect arguments ...]
#
# Needs Chromium (Debian: apt-get install chromium), or another browser's name in CHROMIUM.
set -eu
[ $# -ge 2 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
moesaic=$1 out=$2
shift 2
browser=${CHROMIUM:-chromium}
command -v "$browser" >/dev/null || {
    echo "$0: no $browser; apt-get install chromium, or set CHROMIUM" >&2
    exit 2
}
[ $# -gt 0 ] || set -- "$(dirname "$0")/../../examples/specs/small-bf16.toml" --target h100
mkdir -p "$out"
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
"$moesaic" inspect "$@" --html "$out/page.html"

# The copy that reports: its last element tells the widths and what the slider does.
{
    cat "$out/page.html"
    cat <<'SCRIPT'
<pre id="report"></pre><script>
let say = [], shown = () => [...document.querySelectorAll('tbody[data-t]')].filter(e => e.offsetHeight).map(e => e.dataset.t).join();
say.push('wide=' + (document.documentElement.scrollWidth > innerWidth), 'svg=' + [...document.querySelectorAll('svg')].filter(e => e.getBoundingClientRect().width).length);
let launches = document.querySelector('table.launches').parentElement;
say.push('hidden=' + (innerWidth >= 1400 && launches.scrollWidth > launches.clientWidth));
let slider = document.querySelector('input[type=range]');
if (slider) { let before = shown(); slider.value = 0; slider.oninput(); say.push('slider=' + (before != shown() && shown() == '0')); }
document.getElementById('report').textContent = 'REPORT ' + say.join(' ');
</script>
SCRIPT
} >"$out/reporting.html"

for width in 420 1400; do
    run() {
        "$browser" --headless --no-sandbox --disable-gpu --disable-quic --no-first-run \
            --disable-background-networking --disable-component-update --disable-sync \
            --user-data-dir="$profile" --window-size="$width,2400" "$@"
    }
    run --screenshot="$out/page-$width.png" "file://$(realpath "$out/page.html")" >/dev/null 2>&1
    # A window is at least 500 pixels wide in headless mode, so a frame has the width.
    printf '<iframe src="reporting.html" style="width:%spx;height:2400px;border:0"></iframe><pre id=copy></pre><script>onload=()=>copy.textContent=document.querySelector("iframe").contentDocument.getElementById("report").textContent</script>' "$width" >"$out/frame.html"
    report=$(run --allow-file-access-from-files --virtual-time-budget=3000 --dump-dom \
        "file://$(realpath "$out/frame.html")" 2>"$profile/log" | grep -o 'REPORT [^<]*' | tail -1)
    echo "$width pixels: $report"
    if grep -q 'CONSOLE.*\(rror\)' "$profile/log"; then
        grep CONSOLE "$profile/log"
        exit 1
    fi
    case $report in
    *wide=true* | *hidden=true* | *slider=false* | *svg=0* | "") exit 1 ;;
    esac
done
