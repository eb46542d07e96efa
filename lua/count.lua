-- count.lua: adds what a gateway process has counted to one of the counters.
--
-- All of a key in one step, so that a counter never stands there without its end. What a caller does not hear the
-- answer of is not sent again: a figure may miss something after a fault, and never has it twice.
--
-- KEYS[1]  hash or zset
-- ARGV     'hash' | 'zset', seconds that the key lives from now on, then names and increments
--
-- Returns  how many were added

for n = 3, #ARGV, 2 do
  if ARGV[1] == 'zset' then
    redis.call('ZINCRBY', KEYS[1], ARGV[n + 1], ARGV[n])
  else
    redis.call('HINCRBY', KEYS[1], ARGV[n], ARGV[n + 1])
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return (#ARGV - 2) / 2
