-- heartbeat_host.lua: records the heartbeat of a host that serves apps, and lists the hosts with a recent one.
--
-- The time is Redis's, so that the result does not depend on the clocks of hosts.
--
-- KEYS[1]  zset    host → time of its last heartbeat, ms
-- ARGV     host ('' only lists), lifetime of a heartbeat (ms)
--
-- Returns  {host, …}

local hosts = KEYS[1]
local host, lifetime = ARGV[1], tonumber(ARGV[2])

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if host ~= '' then redis.call('ZADD', hosts, now, host) end
redis.call('ZREMRANGEBYSCORE', hosts, '-inf', now - lifetime)
redis.call('PEXPIRE', hosts, 2 * lifetime)
return redis.call('ZRANGE', hosts, 0, -1)
