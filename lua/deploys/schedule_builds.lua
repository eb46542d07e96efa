-- schedule_builds.lua: records the deploys that wait and run at a builder, and grants it the deploys that it may start.
--
-- All builders share one queue. An account has one build at a time while another account waits. The account with the
-- fewest builds goes first, then the one whose last build started longest ago. The deploys of one app are made one after
-- the other, oldest first: ids sort by time. A deploy that serves a release again waits only for its app. A builder's
-- deploys are forgotten when it does not call within `held_for`. When it calls again, its running deploys count again,
-- except those that another builder has started.
--
-- KEYS[1]  hash    waiting: deploy → JSON {account, app, reuse, tag, entry, ends}
-- KEYS[2]  hash    running: deploy → JSON {account, app, builder, building, ends}
-- KEYS[3]  zset    account → number of its last build
-- ARGV     builder, for how long they count (ms), shared slots of a builder (-1: it leaves), spare slots, number of deploys that wait at the
--          builder; for each of them id and JSON {account, app, reuse, tag, entry}; then for each that runs at the builder
--          id and JSON {account, app, building}
--
-- Returns  {{deploy, tag, entry, …} of those granted, {deploy, …} of those that wait here but run at another builder}

local waiting_key, running_key, order_key = KEYS[1], KEYS[2], KEYS[3]
local builder, held_for = ARGV[1], tonumber(ARGV[2])
local shared, spare, count = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local function read(key)
  local found, flat = {}, redis.call('HGETALL', key)
  for n = 1, #flat, 2 do
    local record = cjson.decode(flat[n + 1])
    if record.ends > now then found[flat[n]] = record else redis.call('HDEL', key, flat[n]) end
  end
  return found
end

local waiting, running = read(waiting_key), read(running_key)

local function run(deploy, record, building)
  record = {account = record.account, app = record.app, builder = builder, building = building, ends = now + held_for}
  running[deploy] = record
  redis.call('HSET', running_key, deploy, cjson.encode(record))
end

local reported, elsewhere = {}, {}
for n = 6 + 2 * count, #ARGV, 2 do
  reported[ARGV[n]] = true
  local record, own = running[ARGV[n]], cjson.decode(ARGV[n + 1])
  if not record then
    run(ARGV[n], own, own.building)
  elseif record.builder == builder then
    run(ARGV[n], record, record.building and own.building)
  end
end
for deploy, record in pairs(running) do
  if record.builder == builder and not reported[deploy] then
    running[deploy] = nil
    redis.call('HDEL', running_key, deploy)
  end
end
for n = 6, 5 + 2 * count, 2 do
  local deploy = ARGV[n]
  if running[deploy] then
    if running[deploy].builder ~= builder then elsewhere[#elsewhere + 1] = deploy end
  else
    local record = cjson.decode(ARGV[n + 1])
    record.ends = now + held_for
    waiting[deploy] = record
    redis.call('HSET', waiting_key, deploy, cjson.encode(record))
  end
end

local busy, builds, own = {}, {}, 0
for _, record in pairs(running) do
  busy[record.app] = true
  if record.building then
    builds[record.account] = (builds[record.account] or 0) + 1
    if record.builder == builder then own = own + 1 end
  end
end

local heads = {}  -- app → the oldest deploy that waits
for deploy, record in pairs(waiting) do
  if not busy[record.app] and (not heads[record.app] or deploy < heads[record.app]) then heads[record.app] = deploy end
end

local granted = {}
local function grant(deploy)
  local record = waiting[deploy]
  run(deploy, record, not record.reuse)
  waiting[deploy], heads[record.app] = nil, nil
  redis.call('HDEL', waiting_key, deploy)
  for _, part in ipairs({deploy, record.tag, record.entry}) do granted[#granted + 1] = part end
end

local reused = {}
for _, deploy in pairs(heads) do
  if waiting[deploy].reuse and shared >= 0 then reused[#reused + 1] = deploy end
end
for _, deploy in ipairs(reused) do grant(deploy) end

local function find_next()
  local oldest, accounts, best = {}, 0, nil
  for _, deploy in pairs(heads) do
    local account = waiting[deploy].account
    if not oldest[account] then accounts = accounts + 1 end
    if not oldest[account] or deploy < oldest[account] then oldest[account] = deploy end
  end
  local function rank(account)
    return {builds[account] or 0, tonumber(redis.call('ZSCORE', order_key, account) or '0'), oldest[account]}
  end
  for account in pairs(oldest) do
    local mine = rank(account)
    if not best or mine[1] < best[1] or (mine[1] == best[1] and (mine[2] < best[2]
        or (mine[2] == best[2] and mine[3] < best[3]))) then best = mine end
  end
  if not best then return nil end
  if best[1] == 0 then return own < shared + spare and best[3] or nil end
  return own < shared and accounts == 1 and best[3] or nil
end

local deploy = shared >= 0 and find_next() or nil
while deploy do
  local account = waiting[deploy].account
  grant(deploy)
  own = own + 1
  builds[account] = (builds[account] or 0) + 1
  local last = redis.call('ZREVRANGE', order_key, 0, 0, 'WITHSCORES')
  redis.call('ZADD', order_key, (tonumber(last[2] or '0')) + 1, account)
  deploy = find_next()
end
for n = 1, 3 do redis.call('PEXPIRE', KEYS[n], 10 * held_for) end
return {granted, elsewhere}
