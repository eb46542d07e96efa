-- lease.lua: renews a process's lease of permits, takes permits back, and grants free ones.
-- uses inference/fair_queue
-- uses inference/quota
--
-- A permit is the right to one request at the provider. No grant makes the sum of the permits that processes hold
-- exceed the limit in force. A process holds `granted - returned`, two numbers that only grow. Therefore a call that
-- comes late or twice, and an answer or a message that is lost, cannot free a permit that is in use. Free permits go to
-- the waiting accounts in the order of fair_queue.lua. Processes get spare ones only while no account waits.
--
-- The provider may also have a quota of requests and tokens in any minute (quota.lua). A waiting request gets its
-- permit and its budget together. A process gets spare budget only while no request waits.
--
-- The limit in force is the configured one. After a cut it is half of what it was, plus, for each second since, a
-- hundredth of the configured one, at least 1.
-- A process that does not call until its lease ends loses its permits. If there are leases but no process has called
-- for AWAY, Redis may have been away. The leases then last for GRACE longer, so that living processes can renew theirs
-- first. If a process called before and Redis knows of no call, Redis has lost its data: it grants nothing for GRACE.
--
-- A call reads the records of its own process and of the processes that are granted something or have ended, however
-- many processes there are: the permits and waiting requests of all processes are kept as two sums.
--
-- KEYS[1]  hash    state: last (ms), cut (the limit at the cut), cut_at (ms), quiet (no grants until, ms), scarce,
--                  sequence, weight, held (permits of all processes), waiting (requests of all processes)
-- KEYS[2]  hash    permits: process -> `<epoch> <call> <granted> <returned> <lease end, ms> <in use> <waiting>
--                  <account>…`; the lease end is that of its last call, and KEYS[6] decides; the accounts are those of
--                  the last grants that the process has not yet confirmed
-- KEYS[3]  hash    waiting      KEYS[4]  zset  order      KEYS[5]  zset  past: see fair_queue.lua
-- KEYS[6]  zset    leases: process -> its end, ms      KEYS[7]  zset  the same for the processes with waiting requests
-- KEYS[8]  hash    quota        KEYS[9]  list  spent: see quota.lua; left out without a quota
-- ARGV     process, epoch, number of the call, grants that the process knows of, permits it has returned, permits in
--          use, waiting requests, spare permits wanted, '1' for a cut, '1' if the process leaves, limit, lease (ms),
--          channel.
--          With a quota, then: requests in a window, tokens in a window (0: no limit), window (ms), '1' if the process
--          has started a request within one window; requests that it knows were granted, returned, spent, wanted as
--          spare; the same for tokens.
--          Then, for each account with a change: account, weight, waiting requests, permits in use, all absolute, and
--          with a quota the tokens that its next request needs. Permits in use are reported while permits are scarce.
--
-- Publishes  to `<channel>:<process>`: `<epoch> <grants before these> <account>…` for grants to another process;
--            to `<channel>`: the calling process, when permits become scarce and spare ones have to be returned
--
-- Returns  {'late'} for a call that a later one has overtaken, or {'ok', known (0: Redis has forgotten the waiting
--          requests of the process, which has to report them again), scarce (1: yes), limit in force, waiting requests
--          of all processes, waiting accounts, ms until a permit may become free by itself (0: never), grants before
--          these, {account or '-' for spare, …}, {account, waiting requests beyond its limit, which the process has to
--          refuse, …}}; with a quota also {requests granted, tokens granted, requests free of all (-1: no limit),
--          tokens free, permits free, the time a window ago, and if requests of the process wait, the entries spent
--          since then}

local caller_name, epoch, call, known_grants = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local returned, used, own_waiting, wanted = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local cuts, leaves, limit, lease, channel = ARGV[9], ARGV[10], tonumber(ARGV[11]), tonumber(ARGV[12]), ARGV[13]
local rated = #KEYS > 7
local window, budget, wanted_requests, wanted_tokens = 0, nil, nil, nil
if rated then
  window = tonumber(ARGV[16])
  budget = {
    {granted = tonumber(ARGV[18]), returned = tonumber(ARGV[19]), spent = tonumber(ARGV[20])},
    {granted = tonumber(ARGV[22]), returned = tonumber(ARGV[23]), spent = tonumber(ARGV[24])},
  }
  wanted_requests, wanted_tokens = tonumber(ARGV[21]), tonumber(ARGV[25])
end
local demand = {}
for n = rated and 26 or 14, #ARGV, rated and 5 or 4 do
  demand[#demand + 1] = {
    account = ARGV[n], weight = ARGV[n + 1], waiting = tonumber(ARGV[n + 2]), used = tonumber(ARGV[n + 3]),
    tokens = rated and tonumber(ARGV[n + 4]),
  }
end

local AWAY = lease / 3           -- ms
local GRACE = lease / 6          -- ms
local SILENT = 1000              -- ms without a call after which a process's waiting requests are forgotten
local KEPT = 3 * lease + window  -- ms that the keys outlive the last call
local ACCOUNT_LIMIT = 60         -- waiting requests of an account, over all processes
local FORGOTTEN = -1             -- recorded as the waiting requests of a silent process

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local function int(number) return string.format('%.0f', number) end

local function parse_process(text)
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

local processes = {}  -- the processes read so far; false for one that does not exist
local function read_process(name)
  if processes[name] == nil then
    local text = redis.call('HGET', KEYS[2], name)
    processes[name] = text and parse_process(text)
  end
  return processes[name]
end

local NAMES = {'last', 'cut', 'cut_at', 'quiet', 'scarce', 'sequence', 'weight', 'held', 'waiting'}
local fields = redis.call('HMGET', KEYS[1], unpack(NAMES))
local last, cut, cut_at = tonumber(fields[1]), tonumber(fields[2]), tonumber(fields[3])
local quiet, was_scarce = tonumber(fields[4] or 0), fields[5] == '1'
local held, waiting = tonumber(fields[8] or 0), tonumber(fields[9] or 0)
queue.open(KEYS[3], KEYS[4], KEYS[5], tonumber(fields[6] or 0), tonumber(fields[7] or 0))

local caller = read_process(caller_name)
if caller and (call <= caller.call or epoch < caller.epoch) then return {'late'} end
if rated then quota.open(KEYS[8], KEYS[9], tonumber(ARGV[14]), tonumber(ARGV[15]), window, now) end

-- The processes. One whose lease has ended is dead: its permits are free, and its waiting requests are gone.
local changed, gone = {}, {}
local function subtract(p) held, waiting = held - (p.granted - p.returned), waiting - math.max(0, p.waiting) end

if last and now - last > AWAY then
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[6], '-inf', int(now + GRACE))) do
    redis.call('ZADD', KEYS[6], int(now + GRACE), name)
    redis.call('ZADD', KEYS[7], 'XX', int(now + GRACE), name)
  end
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[6], '-inf', int(now))) do
  local p = read_process(name)
  if name ~= caller_name then
    if p then subtract(p) end
    if rated then quota.end_lease(name) end
    redis.call('HDEL', KEYS[2], name)
    redis.call('ZREM', KEYS[6], name)
    redis.call('ZREM', KEYS[7], name)
    processes[name], gone[name] = false, true
  end
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[7], '-inf', '(' .. int(now + lease - SILENT))) do
  local p = read_process(name)
  if p and name ~= caller_name then
    waiting = waiting - math.max(0, p.waiting)
    p.waiting, changed[name], gone[name] = FORGOTTEN, true, true
    redis.call('ZREM', KEYS[7], name)
  end
end
if not last and call > 1 then quiet = math.floor(now + GRACE) end
if not last and rated and ARGV[17] == '1' then quota.assume_spent() end

-- The caller.
local known = caller and caller.epoch == epoch and caller.waiting ~= FORGOTTEN
if caller then subtract(caller) end
if not caller or caller.epoch ~= epoch then
  if caller then gone[caller_name] = true end
  caller = {epoch = epoch, granted = 0, returned = 0, labels = {}}
  processes[caller_name] = caller
end
if next(gone) then queue.remove_processes(gone) end
caller.call, caller.ends, caller.used, caller.waiting = call, now + lease, used, own_waiting
caller.granted, caller.returned = math.max(caller.granted, known_grants), math.max(caller.returned, returned)
while #caller.labels > caller.granted - known_grants do table.remove(caller.labels, 1) end
local unconfirmed = {}
for _, account in ipairs(caller.labels) do unconfirmed[account] = (unconfirmed[account] or 0) + 1 end
for _, d in ipairs(demand) do
  -- The process still counts requests as waiting whose grant it does not know of.
  local granted = unconfirmed[d.account] or 0
  queue.set_demand(d.account, d.weight, caller_name, math.max(0, d.waiting - granted), d.used + granted, d.tokens)
end
if rated then quota.report(caller_name, epoch, budget) end
if leaves == '1' then
  if rated then quota.end_lease(caller_name) end
  redis.call('HDEL', KEYS[2], caller_name)
  redis.call('ZREM', KEYS[6], caller_name)
  redis.call('ZREM', KEYS[7], caller_name)
  queue.remove_processes({[caller_name] = true})
  processes[caller_name] = false
else
  held, waiting = held + caller.granted - caller.returned, waiting + caller.waiting
  redis.call('ZADD', KEYS[6], int(caller.ends), caller_name)
  if caller.waiting > 0 then
    redis.call('ZADD', KEYS[7], int(caller.ends), caller_name)
  else
    redis.call('ZREM', KEYS[7], caller_name)
  end
end

-- The limit in force.
local in_force, growth = limit, math.max(1, limit / 100) / 1000  -- per ms
if cut then
  cut_at = math.min(cut_at, now)
  in_force = math.min(limit, cut + math.floor((now - cut_at) * growth))
end
if cuts == '1' and (not cut or now - cut_at >= 1000) then
  in_force = math.max(1, math.floor(in_force / 2))
  cut, cut_at = in_force, now
end

-- Grants: first to the waiting accounts, then, if none waits, spare permits to the caller. A process gets at most half
-- of its share of the free permits, so that the next one to call still finds some.
local free, soonest = in_force - held, nil
local first = redis.call('ZRANGE', KEYS[6], 0, 1, 'WITHSCORES')
for n = #first - 1, 1, -2 do
  if first[n] ~= caller_name then soonest = tonumber(first[n + 1]) end
end
local function grant(name, account)
  local p = processes[name]
  p.granted, p.labels[#p.labels + 1] = p.granted + 1, account
  changed[name] = true
  free, held = free - 1, held + 1
end
if now >= quiet then
  while free > 0 do
    local account, name, tokens = queue.pop(in_force, rated and quota.fits)
    if not account then break end
    if read_process(name) then
      grant(name, account)
      if rated then quota.grant(name, 1, tokens) end
      processes[name].publish = name ~= caller_name
    end
  end
  local none_waits = queue.count_accounts() == 0
  if processes[caller_name] and free > 0 and (none_waits or not rated) then
    local count = redis.call('ZCARD', KEYS[6])
    for _ = 1, math.min(wanted, math.ceil(free / (2 * count))) do grant(caller_name, '-') end
    if rated then
      local requests = quota.spare_part(1, wanted_requests, count)
      quota.grant(caller_name, requests, quota.spare_part(2, wanted_tokens, count))
    end
  end
else
  soonest = math.min(soonest or quiet, quiet)
end

-- The account limit applies only after the grants: a request that this call has just granted does not count.
local excess = {}
for _, d in ipairs(processes[caller_name] and demand or {}) do
  local own, elsewhere = queue.count_waiting(d.account, caller_name)
  local over = own - math.max(0, ACCOUNT_LIMIT - elsewhere)
  if over > 0 then
    queue.set_demand(d.account, d.weight, caller_name, own - over)
    excess[#excess + 1] = d.account
    excess[#excess + 1] = over
  end
end

-- Writes the changes, and publishes them to the processes that they concern.
changed[caller_name] = true
for name in pairs(changed) do
  local p = processes[name]
  if p then write_process(name, p) end
  if p and p.publish then
    local before = int(p.granted - #p.labels)
    redis.call('PUBLISH', channel .. ':' .. name, int(p.epoch) .. ' ' .. before .. ' ' .. table.concat(p.labels, ' '))
  end
end
local accounts = queue.count_accounts()
local scarce = accounts > 0 or free < 0
if not scarce then queue.forget_used() end
if scarce and not was_scarce then redis.call('PUBLISH', channel, caller_name) end
if cut and in_force < limit then
  redis.call('HSET', KEYS[1], 'cut', int(cut), 'cut_at', int(cut_at))
  local grows = cut_at + math.ceil((in_force - cut + 1) / growth)
  soonest = math.min(soonest or grows, grows)
elseif cut then
  redis.call('HDEL', KEYS[1], 'cut', 'cut_at')
end
redis.call('HSET', KEYS[1], 'last', int(now), 'quiet', int(quiet), 'scarce', scarce and '1' or '0', 'held', int(held),
  'waiting', int(waiting), 'sequence', int(queue.sequence), 'weight', string.format('%.17g', queue.weight))
local budget_answer
if rated then
  quota.write()
  local frees_at = accounts > 0 and quota.next_free_at()
  if frees_at then soonest = math.min(soonest or frees_at, frees_at) end
  budget_answer = quota.describe(caller_name)
  budget_answer[5], budget_answer[6] = free, int(now - window)
  budget_answer[7] = caller.waiting > 0 and redis.call('LRANGE', KEYS[9], 0, -1) or {}
end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, int(KEPT)) end

return {
  'ok', known and 1 or 0, scarce and 1 or 0, in_force, waiting, accounts, soonest and math.max(1, soonest - now) or 0,
  caller.granted - #caller.labels, caller.labels, excess, budget_answer,
}
