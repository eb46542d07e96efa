-- record_observation.lua: records what a monitor saw of an app, and queues the events that follow in the same step.
-- uses events/deliveries
--
-- The record has a version, and only a caller that read this version replaces it: of two workers that saw the same, one
-- queues the event.
--
-- KEYS[1]  hash    what is known: `version`, and fields of the caller
-- KEYS[2]  stream  the partition's events      KEYS[3]  the account's log      KEYS[4]  the partition's outcomes
-- KEYS[5]  hash    the data of the account's events      KEYS[6]  zset  what the accounts' data and logs take
-- KEYS[7]  prefix  of awaited outcomes; the event's id is appended here, in the same slot
-- KEYS[8]  zset    app ids by when they are due, ms; or none
-- ARGV     version that was read ('' for none), its next, app id, ms until the next look is due, how many of the
--          following are names and values to write (0: known as before); then events: id, account, app, type, data
--
-- Returns  1 | 0 if the record has changed since, or the app is no longer monitored

local AWAITED = 2 * 86400  -- seconds; an event that waits for longer than one day is dropped

if (redis.call('HGET', KEYS[1], 'version') or '') ~= ARGV[1] then return 0 end
if KEYS[8] then
  if not redis.call('ZSCORE', KEYS[8], ARGV[3]) then return 0 end
  redis.call('ZADD', KEYS[8], string.format('%.0f', now_ms() + tonumber(ARGV[4])), ARGV[3])
end
local fields = tonumber(ARGV[5])
if fields > 0 then
  redis.call('HSET', KEYS[1], 'version', ARGV[2], unpack(ARGV, 6, 5 + fields))
end
for n = 6 + fields, #ARGV, 5 do
  local verdict = enqueue(KEYS[2], KEYS[3], KEYS[4], {ARGV[n], ARGV[n + 1], ARGV[n + 2], ARGV[n + 3], ARGV[n + 4]})
  if ARGV[n + 3] == 'app.unhealthy' then
    local outcome = verdict == 'queued' and 'waiting' or 'dropped'
    redis.call('SET', KEYS[7] .. ':' .. ARGV[n], outcome, 'EX', AWAITED)
  end
end
return 1
