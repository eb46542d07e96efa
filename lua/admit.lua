-- admit.lua: may this request pass, and what may it cost at most?
-- uses clock
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
local app_count, app_oldest = look(KEYS[1], tonumber(ARGV[1]), now)
local user_count, user_oldest = look(KEYS[2], tonumber(ARGV[2]), now)
local spend = KEYS[3] .. ':' .. day
local user_spend = user and KEYS[6] .. ':' .. day

local verdict, settled = 'ok', '0'
local spent, by_user

-- Numbers are formatted by hand: a large one must not become 1.7e+15 on the way into a string.
local function int(number) return string.format('%.0f', number) end

local function fits(paid, held, cap)
  settled = paid or '0'
  local used = settled + (held or 0)
  return used < cap and used + bound <= cap
end

local function find_full_cap()
  spent = redis.call('HMGET', spend, 'settled', 'reserved', 'settled:' .. app, 'reserved:' .. app)
  if not fits(spent[1], spent[2], tonumber(ARGV[4])) then return 'cap' end
  local app_cap = tonumber(ARGV[10] or '')
  if app_cap and not fits(spent[3], spent[4], app_cap) then return 'app_cap' end
  if user then
    by_user = redis.call('HMGET', user_spend, 'settled', 'reserved')
    if not fits(by_user[1], by_user[2], tonumber(ARGV[12])) then return 'user_cap' end
  end
  return 'ok'
end

local latest = tonumber(ARGV[8] or 0)
if latest > 0 and now > latest * 1000 then
  verdict = 'late'
elseif app_count >= tonumber(ARGV[1]) then
  verdict = 'app'
elseif user_count >= tonumber(ARGV[2]) then
  verdict = 'user'
else
  verdict = find_full_cap()
end

if verdict == 'ok' then
  local stamp = int(now)
  redis.call('RPUSH', KEYS[1], stamp)
  redis.call('PEXPIRE', KEYS[1], 60000)
  redis.call('RPUSH', KEYS[2], stamp)
  redis.call('PEXPIRE', KEYS[2], 60000)
  app_count, user_count = app_count + 1, user_count + 1
  if app_oldest == 0 then app_oldest = WINDOW end
  if user_oldest == 0 then user_oldest = WINDOW end
  if bound > 0 then
    local record = ARGV[6] .. ' ' .. day .. ' ' .. ARGV[3] .. ' ' .. app
    local held, app_held = int((spent[2] or 0) + bound), int((spent[4] or 0) + bound)
    redis.call('HSET', spend, 'reserved', held, 'reserved:' .. app, app_held)
    if not spent[2] then redis.call('EXPIRE', spend, 3024000) end
    if user then
      record = record .. ' ' .. user
      redis.call('HSET', user_spend, 'reserved', int((by_user[2] or 0) + bound))
      if not by_user[2] then redis.call('EXPIRE', user_spend, 172800) end
    end
    redis.call('HSET', KEYS[4], ARGV[5], record)
    redis.call('ZADD', KEYS[5], int(math.floor(now / 1000) + tonumber(ARGV[7])), ARGV[5])
  end
end

return {
  verdict, day, app_count, int(app_oldest), user_count, int(user_oldest), int(math.floor(now / 1000)), settled,
}
