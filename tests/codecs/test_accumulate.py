import numpy as np

import gtrace


def test_by_hand():
    c = gtrace.codec("accumulate:topk:ratio=0.34")
    assert str(c) == "accumulate:topk:ratio=0.34"
    assert c.stateful
    assert not c.unbiased
    state = c.init(3)
    sent = []
    for g in ([1.0, 2.0, 3.0], [1.0, 2.0, 0.5], [1.5, 0.5, 0.5]):
        payload = c.encode(state, g, (1, 2))
        q = c.decode(c.shared(state), payload, 3)
        state = c.update(state, g, q)
        sent.append(q.tolist())
    # 3 goes and is cleared; then 2 + 2; then 1 + 1 + 1.5
    assert sent == [[0, 0, 3], [0, 4, 0], [3.5, 0, 0]]
    assert state.arrays["accumulated"].tolist() == [0, 0.5, 1.0]


def test_prefix_and_method_agree_for_the_first_step():
    x = np.random.default_rng(1).standard_normal(300).astype(np.float32)
    own, wrapped = gtrace.codec("mcgq:accumulate=true,amount=0.1"), gtrace.codec("accumulate:mcgq:amount=0.1")
    first = own.decode(own.shared(own.init(300)), own.encode(own.init(300), x, (3, 4)), 300)
    assert (wrapped.decode(b"", wrapped.encode(wrapped.init(300), x, (3, 4)), 300) == first).all()
