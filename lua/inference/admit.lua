-- admit.lua: decides whether a request may pass, and reserves the most that it can cost.
-- uses calendar
-- uses rate_window
--
-- Checks, in this order, the rate windows of the app and of the user, the account's daily spending cap, and the caps
-- that the account holder may have set for the app and for each of its users.
-- The script reads everything, checks everything, and then writes everything or nothing, so a refused request counts
-- nowhere. The time is the server's, so gateways with different clocks agree on each window and day.
--
-- An app's spend is counted in its account's hash, whether the app has a cap or not. A cap that is set at noon counts
-- the morning too. A user's spend is counted only while the app has a cap for users.
--
-- KEYS[1]  rate window of the app
-- KEYS[2]  rate window of the user
-- KEYS[3]  prefix of the account's spend, `…:spend:<account>`; the script appends the day, which only it knows. The key
--          is in the same slot.  hash {settled, reserved, settled:<app>, reserved:<app>}, nano-euro
-- KEYS[4]  hash    the partition's reservations: id -> "<account> <day> <nano-euro> <app>[ <user>]"
-- KEYS[5]  zset    when they expire: id scored by it, milliseconds
-- KEYS[6]  prefix of the user's spend, like KEYS[3]; only with a cap for users.  hash {settled, reserved}
-- ARGV     app limit, user limit (requests in 60 s), max_cost (nano-euro; 0 reserves nothing and only checks whether
--          the cap is full already), cap (nano-euro), reservation id, account id, life (milliseconds), deadline (this
--          server's clock, milliseconds; 0: none), app id. From the deadline on, a call reserves nothing: its caller has
--          given up and has released whatever the call may have reserved, or the price of `max_cost` has changed.
--          Then, only for an app with caps:
--          the app's cap ('' for none), and with a cap for users the user (a hash) and that cap
--
-- Returns  {verdict, day, app count, app frees in, user count, user frees in, now, settled, used, app used, user used}
--          verdict 'ok' | 'app' | 'user' | 'cap' | 'app_cap' | 'user_cap' | 'late'; counts include this request if it
--          passed; frees in = microseconds until the window's next slot is free (0: all are free); now = milliseconds;
--          settled = nano-euro settled today under the last cap that was checked, '0' if none was; used = nano-euro
--          settled and reserved under each cap before this request, '0' without such a cap

local app_limit, user_limit, max_cost = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local cap, reservation, account = tonumber(ARGV[4]), ARGV[5], ARGV[6]
local life, deadline, app = tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9]
local app_cap, user, user_cap = tonumber(ARGV[10] or ''), ARGV[11], tonumber(ARGV[12] or '')

local time = redis.call('TIME')
local seconds = tonumber(time[1])
local now = seconds * 1000000 + tonumber(time[2])

local day = utc_day(seconds)
local app_count, app_frees_in = rate_window.check(KEYS[1], app_limit, now)
local user_count, user_frees_in = rate_window.check(KEYS[2], user_limit, now)
local spend = KEYS[3] .. ':' .. day
local user_spend = user and KEYS[6] .. ':' .. day

local verdict, settled = 'ok', '0'
local reserved_in = {}  -- spend hash -> its reserved money; a hash that has some has an expiry too

local function read_spend(key, suffix)
  local spent = redis.call('HMGET', key, 'settled' .. suffix, 'reserved' .. suffix)
  reserved_in[key] = spent[2]
  return {settled = spent[1] or '0', used = tonumber(spent[1] or 0) + tonumber(spent[2] or 0)}
end

local none = {settled = '0', used = 0}
-- The account's spend is read last, because the app's is in the same hash, and `reserved_in` keeps the account's.
local of_app = app_cap and read_spend(spend, ':' .. app) or none
local of_user = user and read_spend(user_spend, '') or none
local of_account = read_spend(spend, '')

local function fits(spent, cap)
  settled = spent.settled
  return spent.used < cap and spent.used + max_cost <= cap
end

if deadline > 0 and now >= deadline * 1000 then
  verdict = 'late'
elseif app_count >= app_limit then
  verdict = 'app'
elseif user_count >= user_limit then
  verdict = 'user'
elseif not fits(of_account, cap) then
  verdict = 'cap'
elseif app_cap and not fits(of_app, app_cap) then
  verdict = 'app_cap'
elseif user and not fits(of_user, user_cap) then
  verdict = 'user_cap'
end

if verdict == 'ok' then
  app_frees_in = rate_window.record(KEYS[1], now, app_frees_in)
  user_frees_in = rate_window.record(KEYS[2], now, user_frees_in)
  app_count, user_count = app_count + 1, user_count + 1
  if max_cost > 0 then
    local record = account .. ' ' .. day .. ' ' .. ARGV[3] .. ' ' .. app
    redis.call('HINCRBY', spend, 'reserved', ARGV[3])
    redis.call('HINCRBY', spend, 'reserved:' .. app, ARGV[3])
    if not reserved_in[spend] then redis.call('EXPIRE', spend, 3024000) end
    if user then
      record = record .. ' ' .. user
      redis.call('HINCRBY', user_spend, 'reserved', ARGV[3])
      if not reserved_in[user_spend] then redis.call('EXPIRE', user_spend, 172800) end
    end
    redis.call('HSET', KEYS[4], reservation, record)
    redis.call('ZADD', KEYS[5], string.format('%.0f', math.floor(now / 1000) + life), reservation)
  end
end

return {
  verdict, day, app_count, string.format('%.0f', app_frees_in), user_count, string.format('%.0f', user_frees_in),
  string.format('%.0f', math.floor(now / 1000)), settled,
  string.format('%.0f', of_account.used), string.format('%.0f', of_app.used), string.format('%.0f', of_user.used),
}
