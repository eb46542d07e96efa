-- lease.lua: a process renews its lease of permits, gives permits back and says who waits; free permits are granted.
-- uses inference/fair_queue
-- uses inference/quota
--
-- A permit is the right to one request at the provider. The sum of the permits that processes hold never passes the
-- bound in force by a grant. What a process holds is `granted - returned`, two numbers that only grow: a call that comes
-- late or twice, and an answer or a message that is lost, can therefore not free a permit that is in use. Free permits
-- go to the waiting accounts in turn (fair_queue.lua), and only when no account waits to a process as spare ones.
--
-- The provider may also have a quota of requests and tokens in any minute (quota.lua). A waiting request is granted its
-- permit and its budget together; a process gets spare budget only while nobody waits.
--
-- The bound in force is the configured one, or after a cut half of what it was and one more for each second since.
-- A process that did not call until its lease ended loses its permits. If nobody has called for AWAY although there are
-- leases, Redis may have been away: the leases then last for GRACE more, so that the living renew theirs first. If a
-- process called before and Redis knows of none, Redis has lost its data: nothing is granted for GRACE.
--
-- A call reads the records of its own process and of those that are granted something or have ended, however many there
-- are: what all of them hold and wait for is kept as two sums.
--
-- KEYS[1]  hash    state: last (ms), cut (the bound at the cut), cut_at (ms), quiet (no grants until, ms), tight, number,
--                  weight, held (permits of all processes), waiting (requests of all processes)
-- KEYS[2]  hash    permits: process -> `<epoch> <call> <granted> <returned> <lease end, ms> <in use> <waiting> <account>…`;
--                  the lease end is that of its last call, and KEYS[6] decides; the accounts are those of the last
--                  grants, of which the process has not yet said that it knows them
-- KEYS[3]  hash    waiting      KEYS[4]  zset  turns      KEYS[5]  zset  past: see fair_queue.lua
-- KEYS[6]  zset    leases: process -> its end, ms      KEYS[7]  zset  the same of the processes in which requests wait
-- KEYS[8]  hash    rate         KEYS[9]  list  spent: see quota.lua; without a quota they are left out
-- ARGV     1 process, 2 epoch, 3 number of the call, 4 grants it knows of, 5 permits it has returned, 6 in use,
--          7 waiting requests, 8 spare permits wanted, 9 '1' for a cut, 10 '1' when it leaves, 11 bound, 12 lease (ms),
--          13 channel; then account, weight, waiting requests, permits in use: absolute, for each account of which one
--          has changed. What is in use is said while permits are scarce.
--          With a quota, before the accounts: 14 requests in a window, 15 tokens (0: no quota), 16 window (ms), 17 '1' if
--          the process has started a request within one; 18 requests that it knows were granted, 19 returned, 20 spent,
--          21 wanted as spare ones, 22 to 25 the same of tokens; and for each account a fifth field, the tokens that the
--          next of its requests needs.
--
-- Publishes  to `<channel>:<process>`: `<epoch> <grants before these> <account>…` for grants to another process;
--            to `<channel>`: the process that called, when permits become scarce and idle ones shall be returned
--
-- Returns  {'late'} for a call that a later one has overtaken, or {'ok', known (0: it was forgotten and shall say again
--          who waits), tight (1: permits are scarce), bound in force, waiting requests of all, accounts that wait,
--          ms until a permit may become free by itself (0: never), grants before these, {account or '-' for spare, …},
--          {account, waiting requests beyond its limit, which the process shall refuse, …}}; with a quota also
--          {requests granted, tokens granted, requests free of all (-1: no quota), tokens, permits, the time a window ago,
--          and if requests of the process wait what is spent since then}

local me_name, epoch, call = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local bound, lease, channel = tonumber(ARGV[11]), tonumber(ARGV[12]), ARGV[13]
local AWAY = lease / 3           -- ms
local GRACE = lease / 6          -- ms
local SILENT = 1000              -- ms
local rated = #KEYS > 7
local window = rated and tonumber(ARGV[16]) or 0
local KEPT = 3 * lease + window  -- ms that the keys outlive the last call
local ACCOUNT_LIMIT = 60         -- waiting requests of an account, over all processes
local FORGOTTEN = -1             -- waiting requests of a process that was silent
local FIRST, STEP = rated and 26 or 14, rated and 5 or 4  -- where the accounts begin, and the fields of each

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local function int(number) return string.format('%.0f', number) end

local function read_process(text)
  local f, labels = {}, {}
  for field in string.gmatch(text, '%S+') do
    if #f < 7 then f[#f + 1] = tonumber(field) else labels[#labels + 1] = field end
  end
  return {
    epoch = f[1], call = f[2], granted = f[3], returned = f[4], ends = f[5], used = f[6], waiting = f[7],
    labels = labels,
  }
end

local function write_process(name, p)
  local numbers = {p.epoch, p.call, p.granted, p.returned, p.ends, p.used, p.waiting}
  for n, number in ipairs(numbers) do numbers[n] = int(number) end
  redis.call('HSET', KEYS[2], name, table.concat(numbers, ' ') .. ' ' .. table.concat(p.labels, ' '))
end

local processes = {}  -- those that were read; false for those that do not exist
local function process(name)
  if processes[name] == nil then
    local text = redis.call('HGET', KEYS[2], name)
    processes[name] = text and read_process(text)
  end
  return processes[name]
end

local NAMES = {'last', 'cut', 'cut_at', 'quiet', 'tight', 'number', 'weight', 'held', 'waiting'}
local fields = redis.call('HMGET', KEYS[1], unpack(NAMES))
local last, cut, cut_at = tonumber(fields[1]), tonumber(fields[2]), tonumber(fields[3])
local quiet, was_tight = tonumber(fields[4] or 0), fields[5] == '1'
local held, waiting = tonumber(fields[8] or 0), tonumber(fields[9] or 0)
turns.open(KEYS[3], KEYS[4], KEYS[5], tonumber(fields[6] or 0), tonumber(fields[7] or 0))

local me = process(me_name)
if me and (call <= me.call or epoch < me.epoch) then return {'late'} end
if rated then rate.open(KEYS[8], KEYS[9], tonumber(ARGV[14]), tonumber(ARGV[15]), window, now) end

-- The processes. One whose lease has ended is dead: its permits are free and nobody waits in it.
local changed, gone = {}, {}
local function discount(p) held, waiting = held - (p.granted - p.returned), waiting - math.max(0, p.waiting) end

if last and now - last > AWAY then
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[6], '-inf', int(now + GRACE))) do
    redis.call('ZADD', KEYS[6], int(now + GRACE), name)
    redis.call('ZADD', KEYS[7], 'XX', int(now + GRACE), name)
  end
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[6], '-inf', int(now))) do
  local p = process(name)
  if name ~= me_name then
    if p then discount(p) end
    if rated then rate.end_lease(name) end
    redis.call('HDEL', KEYS[2], name)
    redis.call('ZREM', KEYS[6], name)
    redis.call('ZREM', KEYS[7], name)
    processes[name], gone[name] = false, true
  end
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[7], '-inf', '(' .. int(now + lease - SILENT))) do
  local p = process(name)
  if p and name ~= me_name then
    waiting = waiting - math.max(0, p.waiting)
    p.waiting, changed[name], gone[name] = FORGOTTEN, true, true
    redis.call('ZREM', KEYS[7], name)
  end
end
if not last and call > 1 then quiet = math.floor(now + GRACE) end
if not last and rated and ARGV[17] == '1' then rate.fill() end

-- The caller.
local known = me and me.epoch == epoch and me.waiting ~= FORGOTTEN
if me then discount(me) end
if not me or me.epoch ~= epoch then
  if me then gone[me_name] = true end
  me = {epoch = epoch, granted = 0, returned = 0, labels = {}}
  processes[me_name] = me
end
if next(gone) then turns.forget(gone) end
local seen = tonumber(ARGV[4])
me.call, me.ends, me.used, me.waiting = call, now + lease, tonumber(ARGV[6]), tonumber(ARGV[7])
me.granted, me.returned = math.max(me.granted, seen), math.max(me.returned, tonumber(ARGV[5]))
while #me.labels > me.granted - seen do table.remove(me.labels, 1) end
local outstanding = {}
for _, account in ipairs(me.labels) do outstanding[account] = (outstanding[account] or 0) + 1 end
for n = FIRST, #ARGV, STEP do
  -- The process has counted requests as waiting that were granted a permit of which it did not know.
  local granted = outstanding[ARGV[n]] or 0
  local waiting = math.max(0, tonumber(ARGV[n + 2]) - granted)
  turns.set(ARGV[n], ARGV[n + 1], me_name, waiting, tonumber(ARGV[n + 3]) + granted, rated and tonumber(ARGV[n + 4]))
end
if rated then
  local function says(n)
    return {granted = tonumber(ARGV[n]), returned = tonumber(ARGV[n + 1]), spent = tonumber(ARGV[n + 2])}
  end
  rate.report(me_name, epoch, {says(18), says(22)})
end
if ARGV[10] == '1' then
  if rated then rate.end_lease(me_name) end
  redis.call('HDEL', KEYS[2], me_name)
  redis.call('ZREM', KEYS[6], me_name)
  redis.call('ZREM', KEYS[7], me_name)
  turns.forget({[me_name] = true})
  processes[me_name] = false
else
  held, waiting = held + me.granted - me.returned, waiting + me.waiting
  redis.call('ZADD', KEYS[6], int(me.ends), me_name)
  if me.waiting > 0 then
    redis.call('ZADD', KEYS[7], int(me.ends), me_name)
  else
    redis.call('ZREM', KEYS[7], me_name)
  end
end

-- The bound in force.
local in_force = bound
if cut then
  cut_at = math.min(cut_at, now)
  in_force = math.min(bound, cut + math.floor((now - cut_at) / 1000))
end
if ARGV[9] == '1' and (not cut or now - cut_at >= 1000) then
  in_force = math.max(1, math.floor(in_force / 2))
  cut, cut_at = in_force, now
end

-- Grants: to the accounts that wait, in turn; when none does, the caller's spare ones. A process takes half of its
-- part of what is free, so that the next to ask finds some.
local free, soonest = in_force - held, nil
local first = redis.call('ZRANGE', KEYS[6], 0, 1, 'WITHSCORES')
for n = #first - 1, 1, -2 do
  if first[n] ~= me_name then soonest = tonumber(first[n + 1]) end
end
local function grant(name, account)
  local p = processes[name]
  p.granted, p.labels[#p.labels + 1] = p.granted + 1, account
  changed[name] = true
  free, held = free - 1, held + 1
end
if now >= quiet then
  while free > 0 do
    local account, name, tokens = turns.take(in_force, rated and rate.fits)
    if not account then break end
    if process(name) then
      grant(name, account)
      if rated then rate.grant(name, 1, tokens) end
      processes[name].publish = name ~= me_name
    end
  end
  local idle = turns.accounts() == 0
  if processes[me_name] and free > 0 and (idle or not rated) then
    local count = redis.call('ZCARD', KEYS[6])
    for _ = 1, math.min(tonumber(ARGV[8]), math.ceil(free / (2 * count))) do grant(me_name, '-') end
    if rated then
      rate.grant(me_name, rate.part(1, tonumber(ARGV[21]), count), rate.part(2, tonumber(ARGV[25]), count))
    end
  end
else
  soonest = math.min(soonest or quiet, quiet)
end

-- An account has its limit of waiting requests only now: who waits for nothing but this answer does not count.
local excess = {}
for n = FIRST, processes[me_name] and #ARGV or 0, STEP do
  local own, elsewhere = turns.count(ARGV[n], me_name)
  local over = own - math.max(0, ACCOUNT_LIMIT - elsewhere)
  if over > 0 then
    turns.set(ARGV[n], ARGV[n + 1], me_name, own - over)
    excess[#excess + 1] = ARGV[n]
    excess[#excess + 1] = over
  end
end

-- What has changed is written, and said to those whom it concerns.
changed[me_name] = true
for name in pairs(changed) do
  local p = processes[name]
  if p then write_process(name, p) end
  if p and p.publish then
    local before = int(p.granted - #p.labels)
    redis.call('PUBLISH', channel .. ':' .. name, int(p.epoch) .. ' ' .. before .. ' ' .. table.concat(p.labels, ' '))
  end
end
local accounts = turns.accounts()
local tight = accounts > 0 or free < 0
if not tight then turns.close() end
if tight and not was_tight then redis.call('PUBLISH', channel, me_name) end
if cut and in_force < bound then
  redis.call('HSET', KEYS[1], 'cut', int(cut), 'cut_at', int(cut_at))
  local grows = cut_at + (in_force - cut + 1) * 1000
  soonest = math.min(soonest or grows, grows)
elseif cut then
  redis.call('HDEL', KEYS[1], 'cut', 'cut_at')
end
redis.call('HSET', KEYS[1], 'last', int(now), 'quiet', int(quiet), 'tight', tight and '1' or '0', 'held', int(held),
  'waiting', int(waiting), 'number', int(turns.number), 'weight', string.format('%.17g', turns.weight))
local budget
if rated then
  rate.close()
  local frees = accounts > 0 and rate.next_free()
  if frees then soonest = math.min(soonest or frees, frees) end
  budget = rate.answer(me_name)
  budget[5], budget[6], budget[7] = free, int(now - window), me.waiting > 0 and redis.call('LRANGE', KEYS[9], 0, -1) or {}
end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, int(KEPT)) end

return {
  'ok', known and 1 or 0, tight and 1 or 0, in_force, waiting, accounts, soonest and math.max(1, soonest - now) or 0,
  me.granted - #me.labels, me.labels, excess, budget,
}
