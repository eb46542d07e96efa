-- renew_lease.lua: renews the lease of a host, and returns the leases of all hosts.
--
-- Hosts judge by their own clocks how long a lease has not changed. The time of Redis, which can be set forward or back,
-- only decides which leases of hosts that left long ago are removed.
--
-- KEYS[1]  hash    host → time of the renewal (ms), a space, and the lease
-- ARGV     host, its lease ('' ends it), time after which a lease is removed (ms)
--
-- Returns  {host, lease, …}

local leases = KEYS[1]
local host, lease, kept = ARGV[1], ARGV[2], tonumber(ARGV[3])

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if lease == '' then
  redis.call('HDEL', leases, host)
else
  redis.call('HSET', leases, host, string.format('%.0f %s', now, lease))
end
local found = {}
local all = redis.call('HGETALL', leases)
for first = 1, #all, 2 do
  local renewed, text = string.match(all[first + 1], '^(%d+) (.*)$')
  if now - tonumber(renewed) > kept then
    redis.call('HDEL', leases, all[first])
  else
    found[#found + 1] = all[first]
    found[#found + 1] = text
  end
end
redis.call('PEXPIRE', leases, kept)
return found
