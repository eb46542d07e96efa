-- postpone_apps.lua: sets when taken apps that are not inspected for now are due again.
--
-- KEYS[1]  zset    app ids by the time at which they are due, ms
-- ARGV     until when the apps were held (ms); then id, and when it is due (ms), for each app
--
-- Returns  number of apps that were still held until then. The others have become due earlier, or are no
--          longer in the schedule, and stay as they are.

local schedule, held_until = KEYS[1], tonumber(ARGV[1])

local postponed = 0
for n = 2, #ARGV, 2 do
  local app, due = ARGV[n], ARGV[n + 1]
  if tonumber(redis.call('ZSCORE', schedule, app) or '') == held_until then
    redis.call('ZADD', schedule, due, app)
    postponed = postponed + 1
  end
end
return postponed
