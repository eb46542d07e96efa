-- clock.lua: shared by the scripts that count by time. Not a script of its own; see deliveries.lua.

local WINDOW = 60000000  -- microseconds

-- Civil date from days since 1970-01-01 (Lua's os.date is not available to scripts).
local function utc_day(seconds)
  local z = math.floor(seconds / 86400) + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  local year = yoe + era * 400 + (month <= 2 and 1 or 0)
  return string.format('%04d-%02d-%02d', year, month, doy - math.floor((153 * mp + 2) / 5) + 1)
end

-- Drops the entries that have left the window. Returns how many remain, and the microseconds until a slot is free.
-- After the clock was set back, entries of the future count as of now: dropping them would let more requests pass than
-- the limit, and keeping them would block the window for the step and a minute.
local function look(key, limit, now)
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
