-- queue_deploy.lua: queues a deploy of an app, if it may be queued, and cancels the queued one that it replaces.
-- uses calendar
-- uses rate_window
--
-- It checks in the interface's order: the hook's rate, never live, source gone, the day's quota. A call that passes the
-- rate counts as a trigger of its hook, whatever follows. Nothing else is written unless the deploy is queued.
--
-- At most one deploy of an address is queued: a newer one replaces it in the same step, so that no worker can start it
-- in between. A deploy that has started goes on.
--
-- KEYS[1]  list    the hook's window (microseconds)
-- KEYS[2]  hash    when hooks were last used: hook id -> ms
-- KEYS[3]  hash    the app's site: live (deploy id), source (source id), queued:<address> (deploy id)
-- KEYS[4]  prefix  of the account's counters of deploys; the day is appended here, in the same slot
-- KEYS[5]  hash    the deploy's record
-- KEYS[6]  zset    the account's deploys, by when they were queued, ms
-- KEYS[7]  stream  the partition's builds: id, account, app; bounded, in case no worker builds. Deploys that are
--                  replaced are counted in <stream>:ended, as in advance_deploy.lua
-- KEYS[8]  prefix  of the deploys' records; the id of the one that is replaced is appended here, in the same slot
-- ARGV     hook id or '', triggers a minute, quota a day, source id ('': what the app's rules give), repository
--          ('1' or ''), deploy id, account, app id, address (live, preview or p-<slug>), the time as ISO 8601, then
--          names and values of the record
--
-- Returns  {'queued' | 'rate' | 'never-live' | 'source-gone' | 'quota' | 'full', microseconds until the next may pass, day}

local KEPT_DAYS = 90 * 86400  -- seconds
local LISTED = 1000           -- deploys of one account
local WAITING = 10000         -- deploys of one partition

local time = redis.call('TIME')
local seconds = tonumber(time[1])
local now = seconds * 1000000 + tonumber(time[2])
local now_ms = string.format('%.0f', math.floor(now / 1000))
local day = utc_day(seconds)

if ARGV[1] ~= '' then
  local count, frees = rate_window.check(KEYS[1], tonumber(ARGV[2]), now)
  if count >= tonumber(ARGV[2]) then return {'rate', string.format('%.0f', frees), day} end
  rate_window.record(KEYS[1], now, frees)
  redis.call('HSET', KEYS[2], ARGV[1], now_ms)
end

local source = ARGV[4]
if ARGV[5] == '' and source == '' then
  local site = redis.call('HMGET', KEYS[3], 'live', 'source')
  if not site[1] then return {'never-live', '0', day} end
  if not site[2] then return {'source-gone', '0', day} end
  source = site[2]
end

local counter = KEYS[4] .. ':' .. day
if tonumber(redis.call('GET', counter) or 0) >= tonumber(ARGV[3]) then return {'quota', '0', day} end
if redis.call('XLEN', KEYS[7]) >= WAITING then return {'full', '0', day} end

local queued = 'queued:' .. ARGV[9]
local older = redis.call('HGET', KEYS[3], queued)
if older then
  local key = KEYS[8] .. ':' .. older
  local found = redis.call('HMGET', key, 'state', 'entry')
  if found[1] == 'queued' then
    local reason = 'replaced by ' .. ARGV[6] .. ', a newer deploy of the same address'
    redis.call('HSET', key, 'state', 'canceled', 'finishedAt', ARGV[10], 'error', reason)
    redis.call('XDEL', KEYS[7], found[2])
    redis.call('HINCRBY', KEYS[7] .. ':ended', 'canceled', 1)
  end
end
redis.call('HSET', KEYS[3], queued, ARGV[6])

redis.call('INCR', counter)
redis.call('EXPIRE', counter, 172800)

local entry = redis.call('XADD', KEYS[7], '*', 'id', ARGV[6], 'account', ARGV[7], 'app', ARGV[8])
local record = {'state', 'queued', 'queuedMs', now_ms, 'source', source, 'entry', entry, 'address', ARGV[9]}
for n = 11, #ARGV do record[#record + 1] = ARGV[n] end
redis.call('HSET', KEYS[5], unpack(record))
redis.call('EXPIRE', KEYS[5], KEPT_DAYS)
redis.call('ZADD', KEYS[6], now_ms, ARGV[6])
redis.call('ZREMRANGEBYRANK', KEYS[6], 0, -LISTED - 1)
redis.call('EXPIRE', KEYS[6], KEPT_DAYS)
return {'queued', '0', day}
