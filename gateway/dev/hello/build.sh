# Puts the build's variables into the page, as a bundler would.
set -eu
mkdir -p dist
sed -e "s|@BUILT@|$(date -u '+%Y-%m-%d %H:%M:%S') UTC|" -e "s|@AI@|${VITE_SERVICE_AI_URL:-(inference is off)}|" index.html > dist/index.html
echo "Built dist/index.html"
