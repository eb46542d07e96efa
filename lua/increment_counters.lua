-- increment_counters.lua: adds the counts of a gateway process to the counters of one key.
--
-- The counts and the expiry are written in one step, so that no counter lives forever. A caller without a reply does not
-- retry: after a fault, counts may be missing, but nothing is counted twice.
--
-- KEYS[1]  hash or zset
-- ARGV     'hash' | 'zset', TTL of the key (seconds), then names and increments
--
-- Returns  the number of counters

local kind, ttl = ARGV[1], ARGV[2]

for n = 3, #ARGV, 2 do
  local name, increment = ARGV[n], ARGV[n + 1]
  if kind == 'zset' then
    redis.call('ZINCRBY', KEYS[1], increment, name)
  else
    redis.call('HINCRBY', KEYS[1], name, increment)
  end
end
redis.call('EXPIRE', KEYS[1], ttl)
return (#ARGV - 2) / 2
