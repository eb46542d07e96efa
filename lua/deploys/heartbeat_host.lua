-- heartbeat_host.lua: renews the place of a host among those that serve apps, and lists the hosts that are there.
--
-- The time is Redis's, so that the clocks of hosts do not decide who counts.
--
-- KEYS[1]  zset    host → time of its last call, ms
-- ARGV     the host that calls ('' only lists), ms that a host counts after its last call
--
-- Returns  {host, …}

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local lifetime = tonumber(ARGV[2])
if ARGV[1] ~= '' then redis.call('ZADD', KEYS[1], now, ARGV[1]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - lifetime)
redis.call('PEXPIRE', KEYS[1], 2 * lifetime)
return redis.call('ZRANGE', KEYS[1], 0, -1)
