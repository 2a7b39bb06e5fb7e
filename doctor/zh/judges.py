"""The sentences of judges/, and of what torch's flight recorder shows."""

SENTENCES = {
    # ---- comparing.py
    "the run that resumes begins with the epoch that was done": "续训时又从已经训练完的那个 epoch 开始",
    "the gradients are {times} those of one process": "梯度是单进程的 {times}",
    "{size} times": "{size} 倍",
    "1/{size} of": "1/{size}",
    "a step takes {items:.4g} items; with one process {single:.4g}": (
        "一个 step 用 {items:.4g} 条数据，单进程时是 {single:.4g} 条"
    ),
    "it prints {a:g}, with one process {b:g}: {times} it": (
        "这里打印 {a:g}，单进程时是 {b:g}：是后者的 {times}"
    ),
    "it joins as rank {rank}, and its RANK is {number}: is it LOCAL_RANK?": (
        "进程以 rank {rank} 加入进程组，而它的环境变量 RANK 是 {number}：是不是用了 LOCAL_RANK？"
    ),
    # ---- data.py
    "each process reads all {count} items: there is no sampler": (
        "每个进程都读全部 {count} 条数据：没有 sampler"
    ),
    "each process reads the whole stream: __iter__ must give it a part": (
        "每个进程都读完整的数据流：__iter__ 应该只给每个进程一部分"
    ),
    "the processes' samplers have rank {ranks}": "各进程的 sampler 的 rank 分别是 {ranks}",
    "the order is that of the epoch before: call set_epoch(epoch) of its sampler": (
        "顺序和上一个 epoch 一样：要调用 sampler 的 set_epoch(epoch)"
    ),
    "{twice} items are read by several processes": "有 {twice} 条数据被不止一个进程读到",
    "{text}: their samplers' {cause} is {values}": "{text}：各进程的 sampler 的 {cause} 分别是 {values}",
    "{twice} of {size} items are read by several processes, {never} by none": (
        "{size} 条数据里，{twice} 条被不止一个进程读到，{never} 条没有进程读"
    ),
    "the seed is {seed}, that of the sampler is always 0": (
        "seed 是 {seed}，而 sampler 的 seed 总是 0"
    ),
    "{workers} workers for one loader, and {cores} cores": (
        "同一个 DataLoader，各进程一共有 {workers} 个 worker，而 CPU 只有 {cores} 个核"
    ),
    "the processes have {items} items, {batches} batches: one with a batch more waits for the "
    "others in vain": (
        "各进程分别有 {items} 条数据，{batches} 个 batch：多一个 batch 的进程会一直等其他进程，但等不到"
    ),
    "of {all} batches the processes train with {some}": (
        "{all} 个 batch 里，各进程用来训练的分别是 {some} 个"
    ),
    # ---- ending.py
    "it waits here for rank {rank}, which has ended its training": (
        "有进程在这里等 rank {rank}，而后者已经结束了训练"
    ),
    "frozen after the wrapping: {names}": "包装成 DDP 之后才冻结：{names}",
    "rank {ranks} alone calls DDP's model here: it sends its buffers": (
        "这里只有 rank {ranks} 调用包装后的模型，而 DDP 会在这时发送 buffer"
    ),
    "the processes do not make the same calls: {said}": "各进程的调用不一致：{said}",
    "rank {rank} {does} ({line})": "rank {rank} 的 {does}（{line}）",
    "calls {name}()": "{name}() 调用",
    "trains": "训练前向",
    "rank {rank} waits in {call} at {line}": "rank {rank} 在 {line} 等待 {call}",
    "rank {rank} has ended": "rank {rank} 已经结束",
    "rank {rank} is at {line}": "rank {rank} 在 {line}",
    "{said}: will the timeout be longer?": "{said}：timeout 够长吗？",
    "{said}: all processes must call new_group()": "{said}：new_group() 要所有进程都调用",
    # ---- missing.py
    "{never} of {size} items are never validated": "{size} 条数据里有 {never} 条从来没有验证",
    "{text}: drop_last=True": "{text}：drop_last=True",
    # ---- saving.py
    "{count} processes write {names}": "{count} 个进程都写 {names}",
    "{text}, as local rank 0": "{text}，因为它们都是 local rank 0",
    'the keys begin with "module.": save the plain model': (
        "键名以 `module.` 开头：应该保存未包装的模型"
    ),
    "a part of the weights is saved, that of this process: the others save none": (
        "只保存了这个进程的那部分权重，其他进程什么都没有保存"
    ),
    # ---- steps.py
    "DDP's model is not called: nothing is averaged": "没有调用包装后的模型（DDP）：梯度没有求平均",
    "all parts of a step are in no_sync()": "一个 step 的每一份（micro-batch）都在 no_sync() 里",
    "the last forward pass is in no_sync()": "最后一次前向在 no_sync() 里",
    "this second backward's gradients stay local": "这里是第二次 backward，它的梯度只留在本进程",
    "rank {rank} does not load it": "rank {rank} 没有加载这个文件",
    "{name} was frozen when DDP wrapped it: its gradients are not averaged": (
        "DDP 包装时 {name} 是冻结的：它的梯度没有求平均"
    ),
    "each process decides by its own number: {values}": "每个进程按自己的数做决定：{values}",
    "the learning rates differ: {rates}": "各进程的学习率不一致：{rates}",
    "it may be read before another process has saved it ({line}): no barrier() is between": (
        "另一个进程可能还没存完（{line}），这里就去读了：中间没有 barrier()"
    ),
    "the processes make {counts} steps of the optimizer": (
        "各进程的优化器分别做了 {counts} 个 step"
    ),
    "rank {rank} has not called zero_grad() since its last step, others have": (
        "rank {rank} 在上一个 step 之后没有调用 zero_grad()，其他进程调用了"
    ),
    "rank {rank} is not in training mode here, others are: who calls train()?": (
        "rank {rank} 在这里不是训练模式，其他进程是：哪些进程调用了 train()？"
    ),
    "from here on {name} differs between the processes": "从这里起，各进程的 {name} 不一致",
    "the weights differ between the processes from the first step on": (
        "从第一个 step 起，各进程的权重就不一致"
    ),
    "the weights differ between the processes from here on": "从这里起，各进程的权重不一致",
    "{text}: broadcast rank 0's before": "{text}：要先广播 rank 0 的权重",
    "{text}: no DDP, and no gradient is averaged": "{text}：没有用 DDP，也没有对梯度求平均",
    "{text}: DDP has not wrapped them, and averages no gradient of theirs": (
        "{text}：DDP 没有包装它们，不会对它们的梯度求平均"
    ),
    "{text}: no gradient of this optimizer is averaged": "{text}：这个优化器的梯度没有求平均",
    "{name} differs between the processes here: FSDP sends no weights": (
        "这里各进程的 {name} 不一致：FSDP 不发送权重"
    ),
    # ---- together.py
    "ranks {one} and {other} read other items": "rank {one} 和 {other} 读的数据不同",
    "{text}: they have parts of one layer": "{text}，而它们各有同一层的一部分，应该读同样的数据",
    "{text}: they have stages of one pipeline": "{text}，而它们是同一条流水线的不同阶段，应该读同样的数据",
    "each stage is scaled by the norm of its own gradients": "每个阶段只按自己的梯度的范数裁剪",
    "from here on a weight of shape {shape} differs between processes that have the same part "
    "of it": "从这里起，形状为 {shape} 的一个权重，在拥有它的同一部分的进程之间不一致",
    "{text}: is its gradient scaled by each alone?": "{text}：是不是各进程各自裁剪了它的梯度？",
    # ---- training.py
    "all processes give the model the same items: does each read a part of its own?": (
        "所有进程给模型的数据都相同：各进程是否只读自己那一份？"
    ),
    "Python's random": "Python 的 random",
    "backward() goes through what was reduced here, as if it had not been": (
        "backward() 会经过这里归约的结果，但求出的梯度就像没有归约过一样"
    ),
    "the means of the loss are over {counts} items": "各进程的 loss 分别是对 {counts} 个数求的平均",
    "the gradients are still scaled: call scaler.unscale_() first": (
        "这时的梯度还是放大过的：裁剪之前要先调用 scaler.unscale_()"
    ),
    "the schedule has {length} steps, and {done} were done": (
        "学习率调度有 {length} 个 step，实际做了 {done} 个"
    ),
    "all processes draw the same random numbers": "所有进程取到的随机数都一样",
    "all processes draw the same random numbers of {libraries}": (
        "所有进程从 {libraries} 取到的随机数都一样"
    ),
    "async_op=True, and the result is read before wait() was called": (
        "async_op=True，还没有调用 wait() 就读了结果"
    ),
    "async_op=True, and the process has ended before wait() was called": (
        "async_op=True，直到进程结束也没有调用 wait()"
    ),
    "DDP has averaged these gradients already: a sum makes them larger": (
        "DDP 已经对这些梯度求过平均：再求和会让它们变大"
    ),
    "{name} is given tensors of shape {shapes}": "各进程传给 {name} 的张量，形状分别是 {shapes}",
    "the order of this set may be another in each process, and it calls {name}(): sort it": (
        "这个 set 在各进程里的顺序可能不同，而循环里调用了 {name}()：要先排序"
    ),
    # ---- validation.py
    "{count} items that one process validates, another trains with": (
        "有 {count} 条数据，一个进程用来验证，另一个进程却用来训练"
    ),
    "the sampler repeats {padding} of {size} items, for equal parts": (
        "为了让各进程一样多，sampler 重复了 {size} 条数据里的 {padding} 条"
    ),
    "{text}, unless they are cut off again": "{text}，除非之后又去掉了",
    "each process validates a part, and nothing is added up": (
        "每个进程只验证一部分，结果没有加在一起"
    ),
    "each process validates all {count} items: a sum counts them {times} times": (
        "每个进程都验证全部 {count} 条数据：求和时每条会算 {times} 次"
    ),
    "class {number} is {name} in training and {other} here": (
        "编号为 {number} 的类别，训练里是 {name}，这里是 {other}"
    ),
    "the labels are 0 to {last}, in training 0 to {other}: are they the same classes?": (
        "这里的标签是 0 到 {last}，训练里是 0 到 {other}：是同样的类别吗？"
    ),
    "{twice} of {count} validated items count several times": (
        "验证的 {count} 条数据里，有 {twice} 条算了不止一次"
    ),
    "rank {rank} validates items, and adds 0 here each time": (
        "rank {rank} 验证了数据，在这里每次加上的却都是 0"
    ),
    "{name} differs between the processes when they validate": "验证的时候，各进程的 {name} 不一致",
    "{name} of the model that is validated differs between the processes": (
        "各进程验证的模型里，{name} 不一致"
    ),
    "rank {rank} validates in training mode, others do not: who calls eval()?": (
        "rank {rank} 在训练模式下验证，其他进程不是：哪些进程调用了 eval()？"
    ),
    "{line} has read this number before it is added up, and none after": (
        "{line} 在求和之前就读了这个数，求和之后却没有再读"
    ),
    # ---- recorder/
    "{call} {sizes}": "{call} {sizes}",
    "{call} {sizes} ({line})": "{call} {sizes}（{line}）",
    "{ranks} {call}": "{ranks} 是 {call}",
    "its sum of gradients": "梯度求和",
    "{they_have} left out a backward, or is past the loop: call {number} is {calls}, and of "
    "{call} {sizes} it has made {few}, the others {many}": (
        "{they_have} 少做了一次 backward，或者已经出了循环。第 {number} 次调用不一致：{calls}；{call} {sizes} 它做了 {few} 次，其他 rank 做了 {many} 次"
    ),
    "call {number} is {call} in all, of tensors that are not alike: {calls}. Pad them to one "
    "length, or exchange the lengths first": (
        "所有 rank 的第 {number} 次调用都是 {call}，但张量大小不一致：{calls}。请补齐到同样的长度，或者先互相交换长度"
    ),
    "call {number} is not the same: {calls}": "第 {number} 次调用不一致：{calls}",
    "{they_have} not come to call {number}, which is {calls}; {more}": (
        "{they_have} 没有走到第 {number} 次调用，这一次 {calls}；{more}"
    ),
    "its last was {call}": "它最后的调用是 {call}",
    "it has made none": "它没有做过任何调用",
    "rank {rank} {call}: number {number} of its calls of {name} with rank {other}, which has made "
    "{less} of the other kind": (
        "rank {rank} 调用 {call}：这是它和 rank {other} 之间的第 {number} 次 {name}，而对方与之对应的调用只有 {less} 次"
    ),
    "there is no file of {ranks}: it may have died, or stands elsewhere. The others wait in call "
    "{number}, {calls}": (
        "没有 {ranks} 的文件：它可能已经没了，或者停在别处。其他 rank 停在第 {number} 次调用，{calls}"
    ),
    "all ranks have made the same calls; {they_have} not ended call {number}, {calls}: the "
    "network, or a GPU": (
        "所有 rank 的调用都一样；{they_have} 没有做完第 {number} 次调用，{calls}：可能是网络的问题，或者是某张 GPU 的问题"
    ),
    "rank {rank}: {said}": "rank {rank}：{said}",
    "no collective": "没有集合通信",
    "call {last} is the last, call {ended} has ended; the last: {call}": (
        "最后一次是第 {last} 次调用：{call}；做完到第 {ended} 次"
    ),
    "call {last} of group {group} is the last, call {ended} has ended; the last: {call}": (
        "组 {group} 里，最后一次是第 {last} 次调用：{call}；做完到第 {ended} 次"
    ),
    "{text}; {count} messages": "{text}；点对点消息 {count} 条",
    "doctor --dumps: {folder} is no folder": "doctor --dumps：{folder} 不是文件夹",
    "left out: {reason}": "跳过：{reason}",
    "{file}: {why}": "{file}：{why}",
    "{file}: another file is of rank {rank}, too": "{file}：另一个文件也是 rank {rank} 的",
    "no JSON: {error}": "不是 JSON：{error}",
    "no pickle of plain values: {error}": "不是只含普通值的 pickle：{error}",
    "it holds {name}, and would run it": "里面有 {name}，读取时会运行它",
    "it holds a reference to something outside": "里面引用了外部的内容",
    "it has no list of entries": "里面没有 entries 列表",
    "its entries are no calls": "entries 里的记录不是调用记录",
    "no file of the flight recorder in {folder}: their names end with the rank": (
        "{folder} 里没有 flight recorder 的文件：它们的文件名以 rank 结尾"
    ),
    "the ranks have made the same calls, and all have ended": "各 rank 的调用都一样，并且都做完了",
    "the files cannot be compared: {error}": "这些文件没法比较：{error}",
}
