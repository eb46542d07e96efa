# What a bundler would do: the build's variables go into the page.
set -eu
mkdir -p dist
sed -e "s|@BUILT@|$(date -u '+%Y-%m-%d %H:%M:%S') UTC|" -e "s|@AI@|${VITE_SERVICE_AI_URL:-nowhere: it is off}|" index.html > dist/index.html
echo "Built dist/index.html"
