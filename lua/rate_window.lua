-- rate_window.lua: counts the requests of the last 60 seconds. Not a script of its own: a script names it in a line
-- `-- uses rate_window`.
--
-- A window is a list of the times (microseconds) at which requests passed, oldest first. The count is exact: in any 60
-- seconds, no more requests pass than the limit allows.

local WINDOW = 60000000  -- microseconds

local rate_window = {}

-- Drops the entries that have left the window. Returns the number of entries left, and the microseconds until a slot is
-- free. If the clock was set back, entries in the future are set to now. If they were dropped, more requests than the
-- limit would pass. If they were kept, the window would stay blocked for the length of the step plus a minute.
function rate_window.check(key, limit, now)
  local count = redis.call('LLEN', key)
  if count == 0 then return 0, 0 end
  for n = -1, -count, -1 do
    if tonumber(redis.call('LINDEX', key, n)) <= now then break end
    redis.call('LSET', key, n, string.format('%.0f', now))
  end
  local oldest = redis.call('LINDEX', key, 0)
  while oldest and tonumber(oldest) <= now - WINDOW do
    redis.call('LPOP', key)
    count, oldest = count - 1, redis.call('LINDEX', key, 0)
  end
  if count == 0 then return 0, 0 end
  -- After the limit was lowered, several entries must leave before the next request passes. At 0, none passes.
  if count > limit then oldest = redis.call('LINDEX', key, count - math.max(limit, 1)) end
  return count, tonumber(oldest) + WINDOW - now
end

-- Records a request that passes. `frees_in` is the second result of `check`. Returns the microseconds until a slot is
-- free after this request. The time is formatted explicitly: Lua would write a large number as 1.7e+15.
function rate_window.record(key, now, frees_in)
  redis.call('RPUSH', key, string.format('%.0f', now))
  redis.call('PEXPIRE', key, 60000)
  return frees_in == 0 and WINDOW or frees_in
end
