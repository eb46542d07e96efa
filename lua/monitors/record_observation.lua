-- record_observation.lua: records what a monitor saw of an app, and queues the events that follow in the same step.
-- uses events/deliveries
--
-- The record has a version. Only a caller that read the current version can replace the record: of two workers that saw
-- the same, one queues the event.
--
-- KEYS[1]  hash    the monitor's record: `version`, and the caller's fields
-- KEYS[2]  stream  the partition's events      KEYS[3]  the account's log      KEYS[4]  the partition's outcomes
-- KEYS[5]  hash    the data of the account's events      KEYS[6]  zset  bytes that the accounts' data and logs take
-- KEYS[7]  prefix  of awaited outcomes; the event's id is appended here, in the same slot
-- KEYS[8]  zset    app ids by the time at which they are due, ms; optional
-- ARGV     version that was read ('' for none), next version, app id, until when it was held (ms), ms until the app is
--          due again (only if it is still due at that end), number of the following arguments that are names and values
--          to write (0: nothing changes); then events: id, account, app, type, data
--
-- Returns  1 | 0 if the record has changed since (the app is then due at once, unless its next time is set), or the app
--          is no longer monitored

local AWAITED_SECONDS = 2 * 86400  -- an event that waits for longer than one day is dropped

local record, stream, log, outcomes, awaited, schedule = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[7], KEYS[8]
local version, next_version, app, held_until = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local due_in, fields = tonumber(ARGV[5]), tonumber(ARGV[6])

local is_current = (redis.call('HGET', record, 'version') or '') == version
if schedule then
  local due = redis.call('ZSCORE', schedule, app)
  if not due then return 0 end
  if tonumber(due) == held_until then
    redis.call('ZADD', schedule, string.format('%.0f', now_ms() + (is_current and due_in or 0)), app)
  end
end
if not is_current then return 0 end
if fields > 0 then
  redis.call('HSET', record, 'version', next_version, unpack(ARGV, 7, 6 + fields))
end
for n = 7 + fields, #ARGV, 5 do
  local event = {ARGV[n], ARGV[n + 1], ARGV[n + 2], ARGV[n + 3], ARGV[n + 4]}
  local verdict = enqueue(stream, log, outcomes, event)
  if event[4] == 'app.unhealthy' then
    local outcome = verdict == 'queued' and 'waiting' or 'dropped'
    redis.call('SET', awaited .. ':' .. event[1], outcome, 'EX', AWAITED_SECONDS)
  end
end
return 1
