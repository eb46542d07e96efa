-- fair_queue.lua: which waiting account is next, over all processes. Shared: events/deliveries.lua says how.
--
-- The order of gateway/inference/concurrency/fair_queue.py, a virtual counter per account: a served request raises it by
-- COST / weight, and the lowest is next. A score in `turns` is the counter times TIES plus a running number, so that of
-- equal counters the account that reached it first is next. Within an account its processes are served in turn.
--
-- An account that holds its share of the permits already, the bound by the weights of those that wait, lets the others
-- go first: an account whose requests last long would hold nearly all else. It gets no credit for the turns it let pass.
--
--   waiting  hash  account -> `<weight> <process>=<waiting requests>/<permits in use> …`, the next process first; with a
--                  quota of tokens `…=<waiting requests>/<permits in use>/<tokens of the next request>`
--   turns    zset  the accounts that wait, by their counter
--   past     zset  accounts that waited before, by their counter, until nobody waits

local COST = 5040   -- divisible by the weights 1 to 10
local TIES = 16384  -- more than accounts can wait
local PAGE = 50     -- accounts that are read at once

local turns = {}

-- `weight` is the sum of the weights of the accounts that wait.
function turns.open(waiting, ranks, past, number, weight)
  turns.waiting, turns.ranks, turns.past, turns.number, turns.weight = waiting, ranks, past, number, weight
end

local function parse(record)
  local weight, rest = string.match(record or '', '^(%S+)(.*)$')
  local account = {weight = tonumber(weight or 1), processes = {}, waiting = 0, used = 0}
  -- Before 2.1 without what is in use.
  for name, waiting, used, tokens in string.gmatch(rest or '', '(%S+)=(%d+)/?(%d*)/?(%d*)') do
    waiting, used, tokens = tonumber(waiting), tonumber(used) or 0, tonumber(tokens) or 0
    account.processes[#account.processes + 1] = {name = name, waiting = waiting, used = used, tokens = tokens}
    account.waiting, account.used = account.waiting + waiting, account.used + used
  end
  return account
end

local function rank(name, counter)
  turns.number = (turns.number + 1) % TIES
  redis.call('ZADD', turns.ranks, string.format('%.0f', counter * TIES + turns.number), name)
end

local function counter_of(score) return math.floor(tonumber(score) / TIES) end

local function lowest()
  local first = redis.call('ZRANGE', turns.ranks, 0, 0, 'WITHSCORES')
  return first[2] and counter_of(first[2]) or 0
end

-- Writes the account, of which `before` was read: its processes have changed, and maybe its weight.
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
    redis.call('HSET', turns.waiting, name, table.concat(parts, ' '))
  else
    redis.call('HDEL', turns.waiting, name)
  end
  turns.weight = turns.weight - (before.waiting > 0 and before.weight or 0) + (waiting > 0 and account.weight or 0)
  if waiting > 0 and before.waiting == 0 then
    rank(name, math.max(lowest(), tonumber(redis.call('ZSCORE', turns.past, name) or 0)))
    redis.call('ZREM', turns.past, name)
  elseif waiting == 0 and before.waiting > 0 then
    local counter = counter_of(redis.call('ZSCORE', turns.ranks, name) or 0)
    redis.call('ZREM', turns.ranks, name)
    redis.call('ZADD', turns.past, string.format('%.0f', counter), name)
    if redis.call('ZCARD', turns.ranks) > 0 then
      -- A counter that is not above the lowest gives no account less than it would start with.
      redis.call('ZREMRANGEBYSCORE', turns.past, '-inf', string.format('%.0f', lowest()))
    else
      redis.call('DEL', turns.past)
      turns.weight = 0
    end
  end
end

local function read(name)
  local record = redis.call('HGET', turns.waiting, name)
  return parse(record), parse(record)
end

-- In this process `waiting` of the account's requests wait, of which the next needs `tokens`, and `used` permits are in
-- use, if given. The weight counts if any request waits.
function turns.set(name, weight, process, waiting, used, tokens)
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

-- How many of the account's requests wait in this process, and in others.
function turns.count(name, process)
  local account, own = parse(redis.call('HGET', turns.waiting, name)), 0
  for _, p in ipairs(account.processes) do
    if p.name == process then own = p.waiting end
  end
  return own, account.waiting - own
end

-- Nothing waits in these processes any more, nor is in use. One pass over all accounts: it is rare.
function turns.forget(gone)
  local records = redis.call('HGETALL', turns.waiting)
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

-- The account whose turn it is: of those within their share the one with the lowest counter, if there is any.
local function next_account(bound)
  local length, first = redis.call('ZCARD', turns.ranks), nil
  for start = 0, length - 1, PAGE do
    local ranked = redis.call('ZRANGE', turns.ranks, start, start + PAGE - 1, 'WITHSCORES')
    local names = {}
    for n = 1, #ranked, 2 do names[#names + 1] = ranked[n] end
    for n, record in ipairs(redis.call('HMGET', turns.waiting, unpack(names))) do
      local account, counter = parse(record), counter_of(ranked[2 * n])
      first = first or {names[n], counter}
      if length == 1 or account.used < math.max(1, math.floor(bound * account.weight / turns.weight)) then
        return names[n], counter
      end
    end
  end
  if first then return first[1], first[2] end
end

-- Takes the next turn: the account, the process that has the request, and the tokens that it needs; nil when nobody
-- waits. A request whose tokens do not `fit` keeps its turn, and lets none go first: else small ones would always do.
function turns.take(bound, fit)
  local name, counter = next_account(bound)
  if not name then return nil end
  local account, before = read(name)
  local place = 1
  while account.processes[place].waiting == 0 do place = place + 1 end
  if fit and not fit(account.processes[place].tokens) then return nil end
  if counter > lowest() then
    local passed = redis.call('ZRANGEBYSCORE', turns.ranks, '-inf', string.format('(%.0f', counter * TIES))
    for _, other in ipairs(passed) do rank(other, counter) end
  end
  rank(name, counter + math.max(1, math.floor(COST / account.weight + 0.5)))
  local process = table.remove(account.processes, place)
  process.waiting, process.used = process.waiting - 1, process.used + 1
  account.processes[#account.processes + 1] = process
  write(name, account, before)
  return name, process.name, process.tokens
end

function turns.accounts() return redis.call('ZCARD', turns.ranks) end

-- Nobody waits: what is in use is of no interest, and processes say it again when it is.
function turns.close() redis.call('DEL', turns.waiting) end
