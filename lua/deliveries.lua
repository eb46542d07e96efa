-- deliveries.lua: shared by the scripts of event deliveries. Not a script of its own: a script names it in a line
-- `-- uses deliveries`, and the loader puts its text in front.
--
-- An event waits as one entry of its partition's stream until its outcome is known; then it is removed from there and
-- written to its account's log. So the stream's length is the number of waiting events, and none of them is trimmed.
--
--   stream   `{pNN}:events`                  entries id, account, app, type, data (JSON), at (ms)
--   log      `{pNN}:deliveries:<account>`    stream of outcomes, the last 1,000 of 30 days
--   outcomes `{pNN}:outcomes`                hash: outcome -> how often

local WAITING = 100000     -- events of one partition
local LOGGED = 1000        -- outcomes of one account
local DAYS = 30 * 86400    -- seconds

local function now_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function now_ms()
  return math.floor(now_us() / 1000)
end

-- event: {id, account, app, type, data}
local function log_outcome(log, outcomes, event, outcome, at, duration, status, reason)
  redis.call('XADD', log, 'MAXLEN', LOGGED, '*', 'id', event[1], 'type', event[4], 'app', event[3], 'data', event[5],
    'at', at, 'durationMs', duration, 'outcome', outcome, 'status', status, 'error', reason)
  redis.call('EXPIRE', log, DAYS)
  redis.call('HINCRBY', outcomes, outcome, 1)
  if reason ~= '' then redis.call('HINCRBY', outcomes, outcome .. ':' .. reason, 1) end
end

-- Returns 'queued', or 'dropped' if the partition's stream is full; the log records that.
local function enqueue(stream, log, outcomes, event)
  local at = string.format('%.0f', now_ms())
  if redis.call('XLEN', stream) >= WAITING then
    log_outcome(log, outcomes, event, 'dropped', at, 0, '', 'overflow')
    return 'dropped'
  end
  redis.call('XADD', stream, '*', 'id', event[1], 'account', event[2], 'app', event[3], 'type', event[4],
    'data', event[5], 'at', at)
  return 'queued'
end
