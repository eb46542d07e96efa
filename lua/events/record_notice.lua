-- record_notice.lua: records the outcome of a notice: acknowledges, removes and counts it in one step.
--
-- KEYS[1]  stream  the partition's notices to send
-- KEYS[2]  hash    the partition's outcomes of notices
-- ARGV     group, entry, outcome
--
-- Returns  1 | 0 if the notice already had an outcome

if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('HINCRBY', KEYS[2], ARGV[3], 1)
return 1
