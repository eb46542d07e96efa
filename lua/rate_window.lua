-- rate_window.lua: how many requests passed in the last 60 seconds. Shared by scripts; events/deliveries.lua says how.
--
-- A window is a list of the times (microseconds) at which requests passed, oldest first. It counts exactly: at no moment
-- have more than the limit passed in the 60 seconds before it.

local WINDOW = 60000000  -- microseconds

local rate_window = {}

-- Drops the entries that have left the window. Returns how many remain, and the microseconds until a slot is free.
-- After the clock was set back, entries of the future count as of now: dropping them would let more requests pass than
-- the limit, and keeping them would block the window for the step and a minute.
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
  -- After the limit was lowered, more than one has to leave before the next can pass. A limit of 0 lets none pass.
  if count > limit then oldest = redis.call('LINDEX', key, count - math.max(limit, 1)) end
  return count, tonumber(oldest) + WINDOW - now
end

-- Counts a request that passes. `frees` is what `check` said; returns the microseconds until a slot is free now.
-- The time is formatted by hand: a large number must not become 1.7e+15 on the way into a string.
function rate_window.record(key, now, frees)
  redis.call('RPUSH', key, string.format('%.0f', now))
  redis.call('PEXPIRE', key, 60000)
  return frees == 0 and WINDOW or frees
end
