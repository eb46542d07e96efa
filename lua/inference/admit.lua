-- admit.lua: may this request pass, and what may it cost at most?
-- uses calendar
-- uses rate_window
--
-- Decides, in this order, on the windows of the app and of the user, on the day's spend cap of the account, and on the
-- caps that its holder may have set for the app and for each of its users.
-- It reads everything, checks everything, and then writes everything or nothing, so a refused request counts nowhere.
-- Time is the server's, so gateways with different clocks cannot disagree about a window or a day.
--
-- What an app spends is counted beside its account's, in the same hash, whether the app has a cap or not: a cap that is
-- set at noon counts the morning. What a user spends is counted only while the app has a cap for users.
--
-- KEYS[1]  list    the app's window: the times (microseconds) of the requests that passed, oldest first
-- KEYS[2]  list    the user's window, likewise
-- KEYS[3]  prefix of the account's spend, `…:spend:<account>`; the day is appended here, in the same slot, because
--          only this script knows it.  hash {settled, reserved, settled:<app>, reserved:<app>}, nano-euro
-- KEYS[4]  hash    the partition's reservations: id -> "<account> <day> <nano-euro> <app>[ <user>]"
-- KEYS[5]  zset    their leases: id scored by the end of its lease, milliseconds
-- KEYS[6]  prefix of the user's spend, like KEYS[3]; only with a cap for users.  hash {settled, reserved}
-- ARGV     app limit, user limit (requests in 60 s), bound (nano-euro; 0 reserves nothing and only asks whether the
--          cap is full already), cap (nano-euro), reservation id, account id, lease (milliseconds), latest (this
--          server's clock, milliseconds; 0: none). A call that arrives later must take no money, because its caller has
--          given up and has released what the call may have reserved; app id. Then only of an app with caps: the app's
--          cap ('' for none), and with a cap for users the user (a hash) and that cap
--
-- Returns  {verdict, day, app count, app oldest, user count, user oldest, now, settled}
--          verdict 'ok' | 'app' | 'user' | 'cap' | 'app_cap' | 'user_cap' | 'late'; counts include this request if it
--          passed; oldest = microseconds until the window's next slot frees (0: none is taken); now = milliseconds;
--          settled = nano-euro of the day under the cap that was asked last, '0' where none was

local time = redis.call('TIME')
local seconds = tonumber(time[1])
local now = seconds * 1000000 + tonumber(time[2])
local bound, app, user = tonumber(ARGV[3]), ARGV[9], ARGV[11]

local day = utc_day(seconds)
local app_count, app_oldest = rate_window.check(KEYS[1], tonumber(ARGV[1]), now)
local user_count, user_oldest = rate_window.check(KEYS[2], tonumber(ARGV[2]), now)
local spend = KEYS[3] .. ':' .. day
local user_spend = user and KEYS[6] .. ':' .. day

local verdict, settled = 'ok', '0'
local kept = {}  -- the spend hashes that have money reserved, and so an expiry

local function fits(key, suffix, cap)
  local spent = redis.call('HMGET', key, 'settled' .. suffix, 'reserved' .. suffix)
  settled, kept[key] = spent[1] or '0', spent[2]
  local used = tonumber(settled) + tonumber(spent[2] or 0)
  return used < cap and used + bound <= cap
end

local latest = tonumber(ARGV[8] or 0)
if latest > 0 and now > latest * 1000 then
  verdict = 'late'
elseif app_count >= tonumber(ARGV[1]) then
  verdict = 'app'
elseif user_count >= tonumber(ARGV[2]) then
  verdict = 'user'
elseif not fits(spend, '', tonumber(ARGV[4])) then
  verdict = 'cap'
elseif ARGV[10] and ARGV[10] ~= '' and not fits(spend, ':' .. app, tonumber(ARGV[10])) then
  verdict = 'app_cap'
elseif user and not fits(user_spend, '', tonumber(ARGV[12])) then
  verdict = 'user_cap'
end

if verdict == 'ok' then
  app_oldest = rate_window.record(KEYS[1], now, app_oldest)
  user_oldest = rate_window.record(KEYS[2], now, user_oldest)
  app_count, user_count = app_count + 1, user_count + 1
  if bound > 0 then
    local record = ARGV[6] .. ' ' .. day .. ' ' .. ARGV[3] .. ' ' .. app
    redis.call('HINCRBY', spend, 'reserved', ARGV[3])
    redis.call('HINCRBY', spend, 'reserved:' .. app, ARGV[3])
    if not kept[spend] then redis.call('EXPIRE', spend, 3024000) end
    if user then
      record = record .. ' ' .. user
      redis.call('HINCRBY', user_spend, 'reserved', ARGV[3])
      if not kept[user_spend] then redis.call('EXPIRE', user_spend, 172800) end
    end
    redis.call('HSET', KEYS[4], ARGV[5], record)
    redis.call('ZADD', KEYS[5], string.format('%.0f', math.floor(now / 1000) + tonumber(ARGV[7])), ARGV[5])
  end
end

return {
  verdict, day, app_count, string.format('%.0f', app_oldest), user_count, string.format('%.0f', user_oldest),
  string.format('%.0f', math.floor(now / 1000)), settled,
}
