-- Part 5: the calls (broker/ledger.py). Every one answers {status, …}; what is refused has changed nothing.

local calls, needs_open_run = {}, {}

local function start_round(version)
  forget_pool('eval')
  redis_at('DEL', 'eval:answers')
  put('round', version)
end

function calls.OpenRun()
  if scalars.token == args.token then
    return ok(number('incarnation'))
  end
  local another_run = is_open() and scalars.run ~= args.rules.run
  if another_run then
    forget_run()
  end
  for name, value in pairs(args.rules) do
    put(name, value)
  end
  redis_at('SET', 'rules', ARGV[payload])
  put('token', args.token)
  put('scanned_version', -1)
  local incarnation = math.max(number('incarnation', -1), args.after) + 1
  for _ = redis_at('LLEN', 'forks'), incarnation do -- also of those that this ledger does not know
    redis_at('RPUSH', 'forks', another_run and -1 or args.version) -- every group of another run is abandoned
  end
  queue_undone(args.version)
  if args.version < number('durable_version', -1) then
    restart_at(args.base, args.beyond)
  else
    extend_to(args.base, args.beyond)
  end
  put('durable_version', args.version)
  put('unsaved', math.min(math.max(args.unsaved, 0), number('durable', 0)))
  start_round(-1)
  put('version', args.version)
  put('incarnation', incarnation)
  put('finished', '')
  news()
  wake_all()
  return ok(number('incarnation'))
end

local function feed_eval(item, prompt)
  local known = redis_at('HEXISTS', 'eval:prompts', item) == 1 or redis_at('HEXISTS', 'eval:answers', item) == 1
  if not known then
    redis_at('HSET', 'eval:prompts', item, prompt)
    queue('eval', item)
  end
  return not known
end

local function feed_train(item, prompt)
  local live = redis_at('HEXISTS', 'train:prompts', item) == 1 or redis_at('HEXISTS', 'ended', item) == 1
  local known = live or is_durable(item)
  if not known then
    redis_at('HSET', 'train:prompts', item, prompt)
    queue('train', item)
    add('fed', 1)
  end
  return not known
end

needs_open_run.Feed = true
function calls.Feed()
  if #args.items ~= #ARGV - payload + 1 then
    return refused(string.format('%d items were fed with %d prompts', #args.items, #ARGV - payload + 1))
  end
  if args.round and args.round ~= number('round') then
    start_round(args.round)
  end
  local added = 0
  for i, item in ipairs(args.items) do
    local feed = is_eval(item) and feed_eval or feed_train
    if feed(item, ARGV[payload + i - 1]) then
      added = added + 1
    end
  end
  return ok(added)
end

needs_open_run.TakeBatch = true
function calls.TakeBatch()
  if is_finished() then
    return { 'finished', scalars.finished }
  end
  local taken = redis_at('HGET', 'batches', args.version)
  if taken then
    return { 'ok', taken }
  end
  local out = redis_at('HLEN', 'batches')
  local due = number('version') + out
  if args.version ~= due then
    local text = 'a batch for version %d was asked for; the learner is at %d with %d batches out, so the next is for %d'
    return refused(string.format(text, args.version, number('version'), out, due))
  end
  local ready = ready_groups(args.version)
  if not ready then
    return args.last and ok(false) or wait()
  end
  return ok(assemble(args.version, ready))
end

needs_open_run.Spoiled = true
function calls.Spoiled()
  local packed = redis_at('HGET', 'batches', args.version)
  local batch = packed and cmsgpack.unpack(packed) or { lease_ids = {} }
  for i, lease_id in ipairs(batch.lease_ids) do
    if lease_id == args.lease_id then
      take_apart(args.version)
      drop_group(batch.items[i])
      put_back('train', batch.items[i], args.error)
      event('malformed', 1)
    end
  end
  return ok(false)
end

needs_open_run.Trained = true
function calls.Trained()
  local named = args.batch_id == scalars.incarnation .. '.' .. (args.version - 1)
  if named and args.version <= number('version') then
    return ok(false)
  end
  local taken = redis_at('HGET', 'batches', args.version - 1)
  if not named or args.version ~= number('version') + 1 or not taken then
    local text = 'batch %s cannot become version %d: the learner of incarnation %s is at version %s, %d batches out'
    local out = redis_at('HLEN', 'batches')
    return refused(string.format(text, args.batch_id, args.version, scalars.incarnation, scalars.version, out))
  end
  for _, item in ipairs(cmsgpack.unpack(taken).items) do
    drop_group(item)
    redis_at('ZADD', 'trained', args.version, item)
  end
  redis_at('HDEL', 'batches', args.version - 1)
  put('version', args.version)
  news()
  woken.lease, woken.batch = true, true
  return ok(false)
end

needs_open_run.Durable = true
function calls.Durable()
  if args.version > number('version') then
    local text = 'version %d cannot be durable: the learner is at version %s'
    return refused(string.format(text, args.version, scalars.version))
  end
  local positions = {}
  for _, item in ipairs(redis_at('ZRANGEBYSCORE', 'trained', '-inf', args.version)) do
    forget('train', item)
    redis_at('ZREM', 'trained', item)
    redis_at('SREM', 'requeued', position(item))
    table.insert(positions, position(item))
  end
  add('durable', #positions)
  put('unsaved', 0)
  each('ended', function(item, one)
    if one.version and one.version <= args.version then
      redis_at('HDEL', 'ended', item)
      redis_at('SREM', 'requeued', position(item))
      table.insert(positions, position(item))
    end
  end)
  extend_frontier(number('base', 0), positions)
  put('durable_version', math.max(number('durable_version', -1), args.version))
  return ok(false)
end

needs_open_run.EvalResults = true
function calls.EvalResults()
  local items = args.version == number('round') and redis_at('HKEYS', 'eval:answers') or {}
  if #items < args.count and not args.last and not is_finished() then
    return wait()
  end
  return ok(items)
end

needs_open_run.Publish = true
function calls.Publish()
  if ARGV[payload] == redis_at('GET', 'publication') then
    return ok(false)
  end
  if args.incarnation ~= number('incarnation') then
    local text = 'incarnation %d publishes, but %s is open'
    return refused(string.format(text, args.incarnation, scalars.incarnation))
  end
  if args.attempt <= number('published_attempt', args.attempt - 1) then
    local text = 'publication attempt %d is not above %s: attempts are numbered over the whole run'
    return refused(string.format(text, args.attempt, scalars.published_attempt))
  end
  redis_at('SET', 'publication', ARGV[payload])
  put('published_attempt', args.attempt)
  put('published_incarnation', args.incarnation)
  woken.offers = true
  return ok(false)
end

function calls.Finish()
  if not is_finished() then
    put('finished', args.reason ~= '' and args.reason or 'finished')
    news()
    wake_all()
  end
  return ok(false)
end

-- What this very call was given before its connection broke, as far as it still holds: a call sent again must not
-- lease twice.
local function leased_before()
  local packed = redis_at('GET', 'leased:' .. args.member_id)
  local before = packed and cmsgpack.unpack(packed)
  local given = { token = args.token, leases = {}, prompts = {} }
  local same = before and before.token == args.token and args.incarnation == number('incarnation', -1)
  for i, lease in ipairs(same and before.leases or {}) do
    if redis_at('HEXISTS', (is_eval(lease[3]) and 'eval' or 'train') .. ':grants', lease[1]) == 1 then
      table.insert(given.leases, lease)
      table.insert(given.prompts, before.prompts[i])
    end
  end
  return given
end

function calls.LeasePrompts()
  if args.max_prompts < 1 then
    return refused(string.format('a lease of %d prompts', args.max_prompts))
  end
  if is_finished() then
    return { 'finished', scalars.finished }
  end
  local given = leased_before()
  local welcome = is_open() and args.incarnation == number('incarnation') and #given.leases == 0
  while welcome and #given.leases < math.min(args.max_prompts, 256) do
    local pool = nil
    if args.policy_version == number('round') and redis_at('ZCARD', 'eval:queue') > 0 then
      pool = 'eval'
    elseif redis_at('ZCARD', 'train:queue') > 0 and admitted(args.policy_version) then
      pool = 'train'
    else
      break
    end
    local lease, prompt = grant(pool)
    table.insert(given.leases, lease)
    table.insert(given.prompts, prompt)
  end
  if #given.leases == 0 then
    if args.last then
      return ok({})
    end
    wait_for_lease()
    return wait()
  end
  redis_at('SET', 'leased:' .. args.member_id, cmsgpack.pack(given), 'PX', 120000)
  return ok(given.leases, unpack(given.prompts))
end

local function push_eval(head, body)
  if head.incarnation ~= number('incarnation', -1) then
    return 'abandoned'
  end
  if not grant_of('eval', head.lease_id) then
    return 'duplicate'
  end
  drop_grant('eval', head.lease_id)
  forget('eval', head.item)
  redis_at('HSET', 'eval:answers', head.item, body)
  woken.answers = true
  return 'accepted'
end

local function push_train(head, body)
  local entry = grant_of('train', head.lease_id)
  if not entry then
    return abandoned(head.tokens, head.incarnation) and 'abandoned' or 'duplicate'
  end
  local incarnation = math.min(head.incarnation, entry.incarnation)
  if abandoned(head.tokens, incarnation) then
    drop_grant('train', head.lease_id)
    queue('train', head.item)
    return 'abandoned'
  end
  if not has_room(#body) then
    return false
  end
  drop_grant('train', head.lease_id)
  local kept = { tokens = head.tokens, incarnation = incarnation, arrival = add('serial', 1), lease_id = head.lease_id }
  hold(head.item, kept, body)
  woken.batch = redis_at('SCARD', 'buffer') >= number('groups_per_step')
  return 'accepted'
end

function calls.Push()
  for _, head in ipairs(args.heads) do
    local entry = grant_of(is_eval(head.item) and 'eval' or 'train', head.lease_id)
    if entry and entry.item ~= head.item then
      return refused(string.format('lease %s is for item %s, not for %s', head.lease_id, entry.item, head.item))
    end
  end
  if #args.heads ~= #ARGV - payload + 1 then
    return refused(string.format('%d groups were pushed with %d bodies', #args.heads, #ARGV - payload + 1))
  end
  local outcomes = {}
  for i, head in ipairs(args.heads) do
    local push = is_eval(head.item) and push_eval or push_train
    outcomes[i] = push(head, ARGV[payload + i - 1])
    if outcomes[i] and outcomes[i] ~= 'accepted' then
      event(outcomes[i], 1)
    end
  end
  return ok(outcomes)
end

function calls.WorthPushing()
  if is_finished() then
    return { 'finished', scalars.finished }
  end
  local settled = not is_open()
  for _, lease_id in ipairs(args.lease_ids) do
    settled = settled or not grant_of('train', lease_id)
  end
  return ok(settled or has_room(args.size))
end

function calls.Release()
  for _, pool in ipairs({ 'train', 'eval' }) do
    if grant_of(pool, args.lease_id) then
      event(args.error ~= '' and 'failed' or 'released', 1)
      give_back(pool, args.lease_id, args.error)
    end
  end
  return ok(false)
end

function calls.ReadDead()
  local dead = {}
  each('graves', function(item, grave)
    table.insert(dead, { item, grave.attempts, grave.error })
  end)
  return ok(dead)
end

needs_open_run.Requeue = true
function calls.Requeue()
  local count = 0
  for _, item in ipairs(args.items) do
    local packed = redis_at('HGET', 'graves', item)
    if packed then
      redis_at('HSET', 'train:prompts', item, redis_at('HGET', 'graves:prompts', item))
      redis_at('HDEL', 'graves', item)
      redis_at('HDEL', 'graves:prompts', item)
      redis_at('ZREM', 'graves:order', item)
      redis_at('HDEL', 'ended', item)
      untally(cmsgpack.unpack(packed).reason)
      redis_at('SADD', 'requeued', position(item))
      queue('train', item)
      count = count + 1
    end
  end
  event('requeued', count)
  return ok(count)
end
