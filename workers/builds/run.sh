# Runs the build command $1 in the source's folder, where the caches of the app's last live build are already.
#
# node_modules is kept while everything that decides about its contents is the same. Package managers then have little to
# do, except for `npm ci`, which would first delete the folder: it becomes `npm install`, and keeps at least
# node_modules/.cache.

top=$PWD mark=node_modules/.capsule wanted='' same=''
for lock in package-lock.json npm-shrinkwrap.json pnpm-lock.yaml yarn.lock bun.lock bun.lockb; do
    if [ -f "$lock" ]; then
        wanted=$({ cat -- package.json "$lock" .npmrc; node --version; } 2>/dev/null | sha256sum)
        break
    fi
done
if [ -f "$mark" ]; then
    if [ "$(cat "$mark")" = "$wanted" ]; then
        same=1
        echo "Keeping node_modules, because the lock file is the same"
    else
        find node_modules -mindepth 1 -maxdepth 1 ! -name .cache -exec rm -rf {} +
    fi
fi

npm() {
    if [ "${1-}" != ci ] || [ "$PWD" != "$top" ]; then
        command npm "$@"
        return
    fi
    if [ "$same" ] && shift && command npm install --no-audit --no-fund "$@"; then
        return
    fi
    [ ! "$same" ] || set -- ci "$@"
    [ ! -d node_modules/.cache ] || mv node_modules/.cache .capsule-cache
    command npm "$@" || return
    [ ! -d .capsule-cache ] || { mkdir -p node_modules && mv .capsule-cache node_modules/.cache; }
}

(
    command=$1
    shift
    eval "$command"
)
status=$?
if [ "$status" = 0 ] && [ "$wanted" ] && [ -d node_modules ]; then
    printf '%s\n' "$wanted" >"$mark"
fi
exit "$status"
