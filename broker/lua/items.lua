-- Part 3: the states of the training items and every transition between them (broker/items.py, broker/rules.py).

-- Groups that are held, whether in the buffer or in batches: "held" has their heads, "groups" their bodies.
local function outstanding()
  return redis_at('HLEN', 'train:grants') + redis_at('HLEN', 'held')
end

local function window()
  return (number('max_staleness') + 1) * number('groups_per_step')
end

local function oldest_admitted()
  return number('version') + redis_at('HLEN', 'batches') - number('max_staleness')
end

local function admitted(policy_version)
  local known = policy_version >= 0 and policy_version <= number('version') + 1
  local gathered = redis_at('HLEN', 'train:grants') + redis_at('SCARD', 'buffer')
  local bytes = number('held_bytes', 0) < number('max_buffer_bytes') or gathered < number('groups_per_step')
  local room = outstanding() < window() and bytes
  return known and room and policy_version >= oldest_admitted()
end

local function has_room(size)
  local needed = redis_at('SCARD', 'buffer') < number('groups_per_step')
  return needed or number('held_bytes', 0) + size <= number('max_buffer_bytes')
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

local function hold(item, head, body)
  redis_at('HSET', 'held', item, cmsgpack.pack(head))
  redis_at('HSET', 'groups', item, body)
  redis_at('SADD', 'buffer', item)
  add('held_bytes', #body)
end

local function drop_group(item)
  local size = redis_at('HSTRLEN', 'groups', item)
  if redis_at('HDEL', 'held', item) == 1 then
    redis_at('HDEL', 'groups', item)
    redis_at('SREM', 'buffer', item)
    add('held_bytes', -size)
  end
end

local function each_buffered(visit)
  for _, item in ipairs(redis_at('SMEMBERS', 'buffer')) do
    visit(item, cmsgpack.unpack(redis_at('HGET', 'held', item)))
  end
end

-- The buffer without what has nothing to give at `version`, whose prompts are queued again; nil while there is not
-- enough for a batch. Looks only where it can matter: at a version not looked at before, or when there is enough.
local function ready_groups(version)
  local enough = redis_at('SCARD', 'buffer') >= number('groups_per_step')
  if not enough and number('scanned_version', -1) == version then
    return nil
  end
  put('scanned_version', version)
  local ready, stale = {}, 0
  each_buffered(function(item, head)
    if is_stale(head.tokens, version) then
      drop_group(item)
      queue('train', item)
      stale = stale + 1
    else
      local one = { item = item, lease_id = head.lease_id, arrival = head.arrival }
      one.lost = lost_next(head.tokens, version)
      table.insert(ready, one)
    end
  end)
  event(scalars.on_stale == 'drop' and 'dropped' or 'stale', stale)
  return #ready >= number('groups_per_step') and ready or nil
end

local function assemble(version, ready)
  table.sort(ready, function(a, b)
    if a.lost ~= b.lost then
      return a.lost > b.lost
    end
    return a.arrival < b.arrival
  end)
  local batch = { id = scalars.incarnation .. '.' .. version, items = {}, lease_ids = {}, ended = {} }
  for i = 1, number('groups_per_step') do
    table.insert(batch.items, ready[i].item)
    table.insert(batch.lease_ids, ready[i].lease_id)
    redis_at('SREM', 'buffer', ready[i].item)
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
  return batch
end

-- Batches from `version` on were never trained and cannot be: their groups wait in the buffer again.
local function take_apart(version)
  each('batches', function(at, batch)
    if tonumber(at) >= version then
      for _, item in ipairs(batch.items) do
        redis_at('SADD', 'buffer', item)
      end
      for _, one in ipairs(batch.ended) do
        redis_at('HSET', 'ended', one[1], cmsgpack.pack({ reason = one[2], version = false }))
      end
      redis_at('HDEL', 'batches', at)
    end
  end)
end

-- The frontier: every position below `base`, and those in the set "beyond". Positions in the set "requeued" are live
-- again although the frontier may hold them.
local function in_frontier(place)
  return place < number('base', 0) or redis_at('SISMEMBER', 'beyond', place) == 1
end

local function is_durable(item)
  return in_frontier(position(item)) and redis_at('SISMEMBER', 'requeued', position(item)) == 0
end

local function requeued_in_frontier()
  local count = 0
  for _, place in ipairs(redis_at('SMEMBERS', 'requeued')) do
    count = count + (in_frontier(tonumber(place)) and 1 or 0)
  end
  return count
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
      drop_group(item)
      queue('train', item)
    end
  end)
  redis_at('DEL', 'batches')
  for _, item in ipairs(redis_at('ZRANGEBYSCORE', 'trained', '(' .. version, '+inf')) do
    redis_at('ZREM', 'trained', item)
    queue('train', item)
  end
  each_buffered(function(item, head)
    if abandoned(head.tokens, head.incarnation) then
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
    one.reason = tally(one.reason)
    redis_at('HSET', 'ended', item, cmsgpack.pack(one))
  end)
  each('graves', function(item, grave)
    local one = redis_at('HGET', 'ended', item)
    if one then
      grave.reason = cmsgpack.unpack(one).reason
      redis_at('HSET', 'graves', item, cmsgpack.pack(grave))
    else
      redis_at('HDEL', 'graves', item)
      redis_at('HDEL', 'graves:prompts', item)
      redis_at('ZREM', 'graves:order', item)
    end
  end)
  put('durable', frontier_size() - requeued_in_frontier())
  put('fed', number('durable') + redis_at('HLEN', 'train:prompts') + redis_at('HLEN', 'ended'))
end

local function extend_to(base, beyond)
  local before, live_before = frontier_size(), requeued_in_frontier()
  extend_frontier(base, beyond)
  local live, told = drop_durable()
  local unknown = frontier_size() - before - live - told - (requeued_in_frontier() - live_before)
  add('fed', unknown)
  add('durable', unknown + live)
end

-- Another run begins: nothing of the one before is known any more.
local function forget_run()
  forget_pool('train')
  local names = { 'held', 'groups', 'buffer', 'batches', 'trained', 'ended', 'dead', 'events', 'beyond', 'requeued' }
  for _, name in ipairs(names) do
    redis_at('DEL', name)
  end
  for _, name in ipairs({ 'graves', 'graves:prompts', 'graves:order' }) do
    redis_at('DEL', name)
  end
  for _, name in ipairs({ 'fed', 'durable', 'held_bytes', 'base' }) do
    put(name, 0)
  end
  put('durable_version', -1)
end
