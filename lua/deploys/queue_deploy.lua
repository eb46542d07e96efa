-- queue_deploy.lua: queues a deploy of an app, if it may be queued, and cancels the queued one that it replaces.
-- uses calendar
-- uses rate_window
--
-- Checks in this order: the hook's rate, suspended, never live, source gone, the day's quota. A call that passes the
-- rate counts as a trigger of its hook, even if a later check fails. Nothing else is written unless the deploy is
-- queued.
--
-- At most one deploy of an address is queued. A newer one replaces it in the same step, so that no worker can start it
-- in between. A deploy that has started continues.
--
-- KEYS[1]  rate window of the hook
-- KEYS[2]  hash    times of the hooks' last use: hook id -> ms
-- KEYS[3]  hash    the app's site: live (deploy id), source (source id), queued:<address> (deploy id)
-- KEYS[4]  prefix  of the account's counters of deploys; the day is appended here, in the same slot
-- KEYS[5]  hash    the deploy's record
-- KEYS[6]  zset    the account's deploys by the time at which they were queued, ms
-- KEYS[7]  stream  the partition's builds: id, account, app; limited, in case no worker builds. Replaced deploys are
--                  counted in <stream>:ended, as in advance_deploy.lua
-- KEYS[8]  prefix  of the deploys' records; the id of the replaced deploy is appended here, in the same slot
-- ARGV     hook id or '', triggers per minute, suspended ('1' or ''), quota per day,
--          source id ('': the repository, or the live source), repository ('1' or ''), deploy id, account, app id,
--          address (live, preview or p-<slug>), the time as ISO 8601, then names and values of the record
--
-- Returns  {'queued' | 'rate' | 'suspended' | 'never-live' | 'source-gone' | 'quota' | 'full',
--           microseconds until the next may pass, day}

local KEPT_SECONDS = 90 * 86400
local MAX_LISTED = 1000    -- deploys of one account
local MAX_WAITING = 10000  -- deploys of one partition

local window, hooks_used, site, counters = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local record, listed, builds, records = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local hook, hook_limit, suspended, quota, source = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]), ARGV[5]
local repository, deploy, account, app, address, iso_time = ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11]

local time = redis.call('TIME')
local seconds = tonumber(time[1])
local now = seconds * 1000000 + tonumber(time[2])
local now_ms = string.format('%.0f', math.floor(now / 1000))
local day = utc_day(seconds)

if hook ~= '' then
  local count, frees = rate_window.check(window, hook_limit, now)
  if count >= hook_limit then return {'rate', string.format('%.0f', frees), day} end
  rate_window.record(window, now, frees)
  redis.call('HSET', hooks_used, hook, now_ms)
end

if suspended ~= '' then return {'suspended', '0', day} end

if repository == '' and source == '' then
  local live, live_source = unpack(redis.call('HMGET', site, 'live', 'source'))
  if not live then return {'never-live', '0', day} end
  if not live_source then return {'source-gone', '0', day} end
  source = live_source
end

local counter = counters .. ':' .. day
if tonumber(redis.call('GET', counter) or 0) >= quota then return {'quota', '0', day} end
if redis.call('XLEN', builds) >= MAX_WAITING then return {'full', '0', day} end

local queued = 'queued:' .. address
local older = redis.call('HGET', site, queued)
if older then
  local replaced = records .. ':' .. older
  local state, entry = unpack(redis.call('HMGET', replaced, 'state', 'entry'))
  if state == 'queued' then
    local reason = 'replaced by ' .. deploy .. ', a newer deploy of the same address'
    redis.call('HSET', replaced, 'state', 'canceled', 'finishedAt', iso_time, 'error', reason)
    redis.call('XDEL', builds, entry)
    redis.call('HINCRBY', builds .. ':ended', 'canceled', 1)
  end
end
redis.call('HSET', site, queued, deploy)

redis.call('INCR', counter)
redis.call('EXPIRE', counter, 172800)

local entry = redis.call('XADD', builds, '*', 'id', deploy, 'account', account, 'app', app)
local fields = {'state', 'queued', 'queuedMs', now_ms, 'source', source, 'entry', entry, 'address', address}
for n = 12, #ARGV do fields[#fields + 1] = ARGV[n] end
redis.call('HSET', record, unpack(fields))
redis.call('EXPIRE', record, KEPT_SECONDS)
redis.call('ZADD', listed, now_ms, deploy)
redis.call('ZREMRANGEBYRANK', listed, 0, -MAX_LISTED - 1)
redis.call('EXPIRE', listed, KEPT_SECONDS)
return {'queued', '0', day}
