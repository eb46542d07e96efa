-- fair_queue.lua: orders the waiting accounts of all processes. Not a script of its own: lease.lua uses it.
--
-- The order is that of gateway/inference/concurrency/fair_queue.py. Each account has a virtual counter, which a served
-- request raises by COST / weight, and the account with the lowest counter is next. A score in `order` is the counter
-- times TIES plus a sequence number, so of accounts with equal counters the one that reached its counter first is next.
-- Within an account, processes are served in rotation.
--
-- The limit is shared by the weights of the waiting accounts. While an account holds its share, the others go first;
-- otherwise an account with long requests would hold nearly all permits. It gets no credit for the requests that went
-- first.
--
--   waiting  hash  account -> `<weight> <process>=<waiting requests>/<permits in use> …`, the next process first; with a
--                  token quota `…=<waiting requests>/<permits in use>/<tokens of the next request>`
--   order    zset  the waiting accounts by their counter
--   past     zset  accounts that waited before, by their counter, until no account waits

local COST = 5040   -- divisible by the weights 1 to 10
local TIES = 16384  -- more than accounts can wait
local PAGE = 50     -- accounts that are read at once

local queue = {}

-- `weight` is the sum of the weights of the waiting accounts.
function queue.open(waiting, order, past, sequence, weight)
  queue.waiting, queue.order, queue.past, queue.sequence, queue.weight = waiting, order, past, sequence, weight
end

local function parse(record)
  local weight, rest = string.match(record or '', '^(%S+)(.*)$')
  local account = {weight = tonumber(weight or 1), processes = {}, waiting = 0, used = 0}
  for name, waiting, used, tokens in string.gmatch(rest or '', '(%S+)=(%d+)/(%d+)/?(%d*)') do
    waiting, used, tokens = tonumber(waiting), tonumber(used), tonumber(tokens) or 0
    account.processes[#account.processes + 1] = {name = name, waiting = waiting, used = used, tokens = tokens}
    account.waiting, account.used = account.waiting + waiting, account.used + used
  end
  return account
end

local function set_counter(name, counter)
  queue.sequence = (queue.sequence + 1) % TIES
  redis.call('ZADD', queue.order, string.format('%.0f', counter * TIES + queue.sequence), name)
end

local function counter_of(score) return math.floor(tonumber(score) / TIES) end

local function lowest_counter()
  local first = redis.call('ZRANGE', queue.order, 0, 0, 'WITHSCORES')
  return first[2] and counter_of(first[2]) or 0
end

-- Writes an account whose processes, and perhaps weight, have changed since `before` was read.
local function write(name, account, before)
  local parts, waiting = {string.format('%.17g', account.weight)}, 0
  for _, p in ipairs(account.processes) do
    if p.waiting > 0 or p.used > 0 then
      local tokens = p.tokens > 0 and string.format('/%.0f', p.tokens) or ''
      parts[#parts + 1] = string.format('%s=%.0f/%.0f%s', p.name, p.waiting, p.used, tokens)
    end
    waiting = waiting + p.waiting
  end
  if #parts > 1 then
    redis.call('HSET', queue.waiting, name, table.concat(parts, ' '))
  else
    redis.call('HDEL', queue.waiting, name)
  end
  queue.weight = queue.weight - (before.waiting > 0 and before.weight or 0) + (waiting > 0 and account.weight or 0)
  if waiting > 0 and before.waiting == 0 then
    set_counter(name, math.max(lowest_counter(), tonumber(redis.call('ZSCORE', queue.past, name) or 0)))
    redis.call('ZREM', queue.past, name)
  elseif waiting == 0 and before.waiting > 0 then
    local counter = counter_of(redis.call('ZSCORE', queue.order, name) or 0)
    redis.call('ZREM', queue.order, name)
    redis.call('ZADD', queue.past, string.format('%.0f', counter), name)
    if redis.call('ZCARD', queue.order) > 0 then
      -- A counter that is not above the lowest one is not needed: a new account would start at the same counter.
      redis.call('ZREMRANGEBYSCORE', queue.past, '-inf', string.format('%.0f', lowest_counter()))
    else
      redis.call('DEL', queue.past)
      queue.weight = 0
    end
  end
end

-- Returns the account twice: one copy to change, and one for `write`.
local function read(name)
  local record = redis.call('HGET', queue.waiting, name)
  return parse(record), parse(record)
end

-- Records that `waiting` of the account's requests wait in this process and, if given, that the next one needs `tokens`
-- and that `used` permits are in use. The weight counts only if a request waits.
function queue.set_demand(name, weight, process, waiting, used, tokens)
  local account, before = read(name)
  if waiting > 0 then account.weight = tonumber(weight) end
  local found
  for _, p in ipairs(account.processes) do
    if p.name == process then found = p end
  end
  if not found then
    found = {name = process, used = 0, tokens = 0}
    account.processes[#account.processes + 1] = found
  end
  found.waiting, found.used, found.tokens = waiting, used or found.used, tokens or found.tokens
  write(name, account, before)
end

-- Returns the number of the account's requests that wait in this process, and in others.
function queue.count_waiting(name, process)
  local account, own = parse(redis.call('HGET', queue.waiting, name)), 0
  for _, p in ipairs(account.processes) do
    if p.name == process then own = p.waiting end
  end
  return own, account.waiting - own
end

-- Removes the waiting requests and the permits in use of these processes. It reads all accounts, but runs rarely.
function queue.remove_processes(gone)
  local records = redis.call('HGETALL', queue.waiting)
  for n = 1, #records, 2 do
    local account, left = parse(records[n + 1]), {}
    for _, p in ipairs(account.processes) do
      if not gone[p.name] then left[#left + 1] = p end
    end
    if #left < #account.processes then
      account.processes = left
      write(records[n], account, parse(records[n + 1]))
    end
  end
end

-- Returns the next account and its counter: the one with the lowest counter of the accounts within their share, or of
-- all accounts if there is none.
local function next_account(limit)
  local length, first = redis.call('ZCARD', queue.order), nil
  for start = 0, length - 1, PAGE do
    local scores = redis.call('ZRANGE', queue.order, start, start + PAGE - 1, 'WITHSCORES')
    local names = {}
    for n = 1, #scores, 2 do names[#names + 1] = scores[n] end
    for n, record in ipairs(redis.call('HMGET', queue.waiting, unpack(names))) do
      local account, counter = parse(record), counter_of(scores[2 * n])
      first = first or {names[n], counter}
      if length == 1 or account.used < math.max(1, math.floor(limit * account.weight / queue.weight)) then
        return names[n], counter
      end
    end
  end
  if first then return first[1], first[2] end
end

-- Removes the next request. Returns its account, its process and the tokens that it needs; nil if no request waits, or
-- if its tokens do not `fit`. Such a request stays first: otherwise small requests would always overtake it.
function queue.pop(limit, fit)
  local name, counter = next_account(limit)
  if not name then return nil end
  local account, before = read(name)
  local index = 1
  while account.processes[index].waiting == 0 do index = index + 1 end
  if fit and not fit(account.processes[index].tokens) then return nil end
  if counter > lowest_counter() then
    local passed = redis.call('ZRANGEBYSCORE', queue.order, '-inf', string.format('(%.0f', counter * TIES))
    for _, other in ipairs(passed) do set_counter(other, counter) end
  end
  set_counter(name, counter + math.max(1, math.floor(COST / account.weight + 0.5)))
  local process = table.remove(account.processes, index)
  process.waiting, process.used = process.waiting - 1, process.used + 1
  account.processes[#account.processes + 1] = process
  write(name, account, before)
  return name, process.name, process.tokens
end

function queue.count_accounts() return redis.call('ZCARD', queue.order) end

-- Forgets the permits in use. Nothing needs them while no request waits, and processes report them again once one does.
function queue.forget_used() redis.call('DEL', queue.waiting) end
