-- compare_and_set.lua: writes or removes one record and announces the change to every process, in one step.
--
-- If a process died between the write and the announcement, others would keep the old record in their caches. The
-- expected value makes the write a compare-and-set, for records that several processes change.
--
-- KEYS[1]  string  the record
-- KEYS[2]  string  what goes with this record: it is written or removed with it; or none
-- ARGV     channel, check ('any' or 'same'), expected value ('' for none; with 'same'), new value ('' removes); for KEYS[2]
--          its value ('' removes), and the seconds that it lives
--
-- Returns  1 when it was written, 0 when the record was not the expected one

if ARGV[2] == 'same' and (redis.call('GET', KEYS[1]) or '') ~= ARGV[3] then return 0 end
if ARGV[4] == '' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[4])
end
if KEYS[2] then
  if ARGV[5] == '' then
    redis.call('DEL', KEYS[2])
  else
    redis.call('SET', KEYS[2], ARGV[5], 'EX', ARGV[6])
  end
end
redis.call('PUBLISH', ARGV[1], KEYS[1])
return 1
