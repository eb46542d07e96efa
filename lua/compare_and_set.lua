-- compare_and_set.lua: writes or removes one record and announces the change to every process, in one step.
--
-- If a process died between the write and the announcement, others would keep the old record in their caches. The
-- expected value makes the write a compare-and-set, for records that several processes change.
--
-- KEYS[1]  string  the record
-- KEYS[2]  string  a value that is written or removed with the record; optional
-- ARGV     channel, check ('any' | 'same'), expected record ('' for none; only with 'same'), new record ('' removes it);
--          for KEYS[2] its value ('' removes it), its TTL (seconds), and optionally the value that it must have now ('' for
--          none)
--
-- Returns  1 if the record was written, 0 if one of the two was not the expected one

local channel, check, expected, record = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local companion, ttl, expected_companion = ARGV[5], ARGV[6], ARGV[7]

if check == 'same' and (redis.call('GET', KEYS[1]) or '') ~= expected then return 0 end
if expected_companion and (redis.call('GET', KEYS[2]) or '') ~= expected_companion then return 0 end
if record == '' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], record)
end
if KEYS[2] then
  if companion == '' then
    redis.call('DEL', KEYS[2])
  else
    redis.call('SET', KEYS[2], companion, 'EX', ttl)
  end
end
redis.call('PUBLISH', channel, KEYS[1])
return 1
