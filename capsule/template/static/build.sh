# Copies the pages to dist, and sets the variable that a Vite build sets: the address of the app's model.
set -eu
rm -rf dist
cp -R site dist
printf 'import.meta.env = { VITE_SERVICE_AI_URL: "%s" }; ' "${VITE_SERVICE_AI_URL-}" | cat - site/lib/ai.js > dist/lib/ai.js
