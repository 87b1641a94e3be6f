-- Part 3: the states of the training items and every transition between them (broker/items.py, broker/rules.py).

local function in_batches()
  local total = 0
  each('batches', function(_, batch)
    total = total + #batch.items
  end)
  return total
end

local function admitted(policy_version)
  local version, batches_out = number('version'), redis_at('HLEN', 'batches')
  local outstanding = redis_at('HLEN', 'train:grants') + redis_at('HLEN', 'buffer') + in_batches()
  local eta = number('max_staleness')
  local known = policy_version >= 0 and policy_version <= version + 1
  local window = (eta + 1) * number('groups_per_step')
  return known and outstanding < window and policy_version >= version + batches_out - eta
end

-- tokens: list of {version, count}.
local function abandoned(tokens, incarnation)
  local later = nil
  for _, fork in ipairs(redis_at('LRANGE', 'forks', math.max(0, incarnation + 1), -1)) do
    later = math.min(later or tonumber(fork), tonumber(fork))
  end
  for _, pair in ipairs(later and tokens or {}) do
    if pair[1] > later then
      return true
    end
  end
  return false
end

local function is_stale(tokens, version)
  local oldest, too_old = version - number('max_staleness'), 0
  for _, pair in ipairs(tokens) do
    if pair[1] < oldest then
      too_old = too_old + 1
    end
  end
  if scalars.on_stale == 'drop' then
    return too_old > 0
  end
  return too_old > 0 and too_old == #tokens
end

local function lost_next(tokens, version)
  for _, pair in ipairs(tokens) do
    if pair[1] == version - number('max_staleness') then
      return pair[2]
    end
  end
  return 0
end

local function drop_group(item)
  redis_at('HDEL', 'buffer', item)
  redis_at('HDEL', 'groups', item)
end

-- The buffer without what has nothing to give at `version`, whose prompts are queued again.
local function ready_groups(version)
  local ready, stale = {}, 0
  each('buffer', function(item, held)
    if is_stale(held.tokens, version) then
      drop_group(item)
      queue('train', item)
      stale = stale + 1
    else
      table.insert(ready, { item = item, lost = lost_next(held.tokens, version), held = held })
    end
  end)
  event(scalars.on_stale == 'drop' and 'dropped' or 'stale', stale)
  changed = changed or stale > 0
  return ready
end

local function assemble(version, ready)
  table.sort(ready, function(a, b)
    if a.lost ~= b.lost then
      return a.lost > b.lost
    end
    return a.held.arrival < b.held.arrival
  end)
  local batch = { id = scalars.incarnation .. '.' .. version, items = {}, ended = {}, size = 0 }
  for i = 1, number('groups_per_step') do
    table.insert(batch.items, ready[i].item)
    batch.size = batch.size + ready[i].held.size
    redis_at('HDEL', 'buffer', ready[i].item)
  end
  each('ended', function(item, one)
    if not one.version then
      table.insert(batch.ended, { item, one.reason })
      redis_at('HSET', 'ended', item, cmsgpack.pack({ reason = one.reason, version = version + 1 }))
    end
  end)
  table.sort(batch.ended, function(a, b)
    return position(a[1]) < position(b[1])
  end)
  redis_at('HSET', 'batches', version, cmsgpack.pack(batch))
  changed = true
  return batch
end

-- The frontier: every position below `base`, and those in the set "beyond".
local function is_durable(item)
  return position(item) < number('base', 0) or redis_at('SISMEMBER', 'beyond', position(item)) == 1
end

local function frontier_size()
  return number('base', 0) + redis_at('SCARD', 'beyond')
end

local function extend_frontier(base, positions)
  if base > number('base', 0) then
    for _, one in ipairs(redis_at('SMEMBERS', 'beyond')) do
      if tonumber(one) < base then
        redis_at('SREM', 'beyond', one)
      end
    end
    put('base', base)
  end
  base = number('base', 0)
  for _, one in ipairs(positions) do
    if one >= base then
      redis_at('SADD', 'beyond', one)
    end
  end
  while redis_at('SREM', 'beyond', base) == 1 do
    base = base + 1
  end
  put('base', base)
end

local function queue_undone(version)
  each('batches', function(_, batch)
    for _, item in ipairs(batch.items) do
      redis_at('HDEL', 'groups', item)
      queue('train', item)
    end
  end)
  redis_at('DEL', 'batches')
  for _, item in ipairs(redis_at('ZRANGEBYSCORE', 'trained', '(' .. version, '+inf')) do
    redis_at('ZREM', 'trained', item)
    queue('train', item)
  end
  each('buffer', function(item, held)
    if abandoned(held.tokens, held.incarnation) then
      drop_group(item)
      queue('train', item)
    end
  end)
  each('train:grants', function(lease_id, entry)
    if entry.version > version then
      drop_grant('train', lease_id)
      queue('train', entry.item)
    end
  end)
  each('ended', function(item, one)
    if one.version and one.version > version then
      redis_at('HSET', 'ended', item, cmsgpack.pack({ reason = one.reason, version = false }))
    end
  end)
end

-- Forgets the live and the ended items that are durable now; returns how many of each.
local function drop_durable()
  local live, told = 0, 0
  for _, item in ipairs(redis_at('HKEYS', 'train:prompts')) do
    if is_durable(item) then
      live = live + 1
      forget('train', item)
      drop_group(item)
      redis_at('ZREM', 'trained', item)
    end
  end
  each('train:grants', function(lease_id, entry)
    if redis_at('HEXISTS', 'train:prompts', entry.item) == 0 then
      drop_grant('train', lease_id)
    end
  end)
  for _, item in ipairs(redis_at('HKEYS', 'ended')) do
    if is_durable(item) then
      told = told + 1
      redis_at('HDEL', 'ended', item)
    end
  end
  return live, told
end

local function restart_at(base, beyond)
  put('base', 0)
  redis_at('DEL', 'beyond')
  extend_frontier(base, beyond)
  drop_durable()
  redis_at('DEL', 'dead')
  each('ended', function(item, one)
    redis_at('HSET', 'ended', item, cmsgpack.pack({ reason = tally(one.reason), version = one.version }))
  end)
  put('durable', frontier_size())
  put('fed', frontier_size() + redis_at('HLEN', 'train:prompts') + redis_at('HLEN', 'ended'))
end

local function extend_to(base, beyond)
  local before = frontier_size()
  extend_frontier(base, beyond)
  local live, told = drop_durable()
  local unknown = frontier_size() - before - live - told
  add('fed', unknown)
  add('durable', unknown + live)
end
