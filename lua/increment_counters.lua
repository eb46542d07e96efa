-- increment.lua: adds what a gateway process has counted to one of the counters.
--
-- A key's counts and its expiry are written in one step, so that no counter lives forever. A caller that gets no answer
-- does not call again: after a fault a figure may lack something, but it never counts it twice.
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
