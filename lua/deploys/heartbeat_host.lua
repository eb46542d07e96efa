-- heartbeat_host.lua: records the heartbeat of a host that serves apps, and lists the hosts with a recent one.
--
-- The time is Redis's, so that the result does not depend on the clocks of hosts. Without shared storage, the apps are in
-- one data folder. Hosts and builders with another folder must not count, because they do not have the apps.
--
-- KEYS[1]  zset    host → time of its last heartbeat, ms
-- KEYS[2]  string  id of the data folder that holds the apps, if there is no shared storage
-- ARGV     host ('' only lists), lifetime of a heartbeat (ms), id of the caller's data folder ('' for shared storage),
--          seconds for which the folder is remembered
--
-- Returns  {0} if the apps are in another folder, else {1, host, …}

local hosts, apps_folder = KEYS[1], KEYS[2]
local host, lifetime, folder, kept = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if folder == '' then
  redis.call('DEL', apps_folder)
else
  if (redis.call('GET', apps_folder) or folder) ~= folder then return {0} end
  redis.call('SET', apps_folder, folder, 'EX', kept)
end
if host ~= '' then redis.call('ZADD', hosts, now, host) end
redis.call('ZREMRANGEBYSCORE', hosts, '-inf', now - lifetime)
redis.call('PEXPIRE', hosts, 2 * lifetime)
return {1, unpack(redis.call('ZRANGE', hosts, 0, -1))}
