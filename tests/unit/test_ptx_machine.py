"""The machine that runs PTX: what instructions do to registers and memory, and every fault."""

import numpy as np
import pytest
from ptx_machine import Machine
from ptx_text import Fault

HEAD = """
.version 8.0
.target sm_90
.extern .shared .align 16 .b8 smem[];
"""


def run(body, given, *, threads=32, before="", memory=None):
    """Run a kernel whose one argument, in %rd1, is the address of an array; returns the array."""
    given = np.array(given)
    text = f"""{HEAD}{before}
    .visible .entry kernel(.param .u64 kernel_param_0)
    .maxntid {threads}, 1, 1
    {{
        .reg .pred %p<8>; .reg .b16 %rs<8>; .reg .b32 %r<20>; .reg .f32 %f<20>; .reg .b64 %rd<10>;
        ld.param.u64 %rd1, [kernel_param_0];
        mov.u32 %r1, %tid.x;  // in %rd2 the thread's own place
        mul.wide.u32 %rd2, %r1, 4;
        add.s64 %rd2, %rd1, %rd2;
        {body}
        ret;
    }}"""
    address = given.ctypes.data
    memory = [(address, address + given.nbytes)] if memory is None else memory
    arguments = [address.to_bytes(8, "little")]
    Machine(text, "kernel").launch((1, 1, 1), (threads, 1, 1), 256, arguments, memory)
    return given


def test_threads_count_in_a_loop():
    """Each as often as its number says; those who are done wait where the paths meet."""
    found = run(
        """
        mov.u32 %r2, 0;
        $AGAIN:
        setp.ge.u32 %p1, %r2, %r1;
        @%p1 bra $DONE;
        add.s32 %r2, %r2, 1;
        bra.uni $AGAIN;
        $DONE:
        shl.b32 %r3, %r2, 1;
        st.global.u32 [%rd2], %r3;
        """,
        np.zeros(64, np.uint32), threads=64,
    )  # fmt: skip
    assert found.tolist() == [2 * i for i in range(64)]


def test_halves():
    """Sums of pairs, rounded as the type is."""
    found = run(
        """
        cvt.rn.f32.u32 %f1, %r1;
        cvt.rn.bf16x2.f32 %r2, 0f3F800000, %f1;
        fma.rn.bf16x2 %r3, %r2, %r2, %r2;
        st.global.u32 [%rd2], %r3;
        """,
        np.zeros(32, np.uint32),
    )  # fmt: skip
    low = (found << 16).view(np.float32)
    assert (found >> 16 == 0x4000).all()
    assert np.allclose(low, np.arange(32.0) ** 2 + np.arange(32), rtol=2**-8)
    assert (low.view(np.uint32) & 0xFFFF == 0).all()


def test_warps_multiply_what_blocks_share():
    """A tile goes into shared memory, comes back turned, and is multiplied with a unit matrix."""
    found = run(
        """
        shl.b32 %r2, %r1, 2;
        mov.u32 %r3, smem;
        add.s32 %r3, %r3, %r2;
        cvt.rn.f32.u32 %f1, %r1;
        cvt.rn.f16x2.f32 %r4, 0f00000000, %f1;
        st.shared.u32 [%r3], %r4;
        bar.sync 0;
        and.b32 %r5, %r1, 7;
        mad.lo.s32 %r5, %r5, 16, 0;
        ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r6}, [%r5];
        and.b32 %r7, %r1, 3;
        shr.u32 %r8, %r1, 2;
        shl.b32 %r9, %r7, 1;
        setp.eq.u32 %p1, %r8, %r9;
        selp.b32 %r10, 15360, 0, %p1;
        add.s32 %r9, %r9, 1;
        setp.eq.u32 %p1, %r8, %r9;
        selp.b32 %r11, 1006632960, 0, %p1;
        or.b32 %r10, %r10, %r11;
        mov.u32 %r12, 0;
        mov.b32 %f2, 0;
        mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32
        {%f2, %f3, %f4, %f5}, {%r6, %r12}, {%r10}, {%f2, %f2, %f2, %f2};
        st.global.f32 [%rd2], %f2;
        """,
        np.zeros(32, np.float32),
    )  # fmt: skip
    # Row i and column 2 j of the turned tile, which is row 2 j and column i: numbers stand in even columns.
    wanted = [[8 * j + i // 2 if i % 2 == 0 else 0 for j in range(4)] for i in range(8)]
    assert found.reshape(8, 4).tolist() == wanted


# A warp of which lanes from 20 on come a second way, and jump backwards to the same instruction.
SECOND_WAY = """
    mov.u32 %r2, %r1;
    setp.ge.u32 %p1, %r1, 20;
    @%p1 bra $SECOND;
    $MEET:
    WHAT
    bra.uni $DONE;
    $SECOND:
    add.s32 %r2, %r1, 100;
    bra.uni $MEET;
    $DONE:
    st.global.u32 [%rd2], %r3;
"""
COME = [lane + 100 * (lane >= 20) for lane in range(32)]
MEETINGS = {
    "shuffle": ("shfl.sync.bfly.b32 %r3, %r2, 16, 31, -1;", [COME[lane ^ 16] for lane in range(32)]),
    "vote": ("setp.ge.u32 %p2, %r2, 100; vote.sync.ballot.b32 %r3, %p2, -1;", [0xFFF00000] * 32),
    "least": ("redux.sync.max.u32 %r3, %r2, -1;", [131] * 32),
    "tile": (
        "movmatrix.sync.aligned.m8n8.trans.b16 %r3, %r2;",
        # of rows of 8 halves, of which two neighbours are a number and 0
        [COME[8 * (lane % 4) + lane // 8] + (COME[8 * (lane % 4) + 4 + lane // 8] << 16) if lane // 4 % 2 == 0 else 0
         for lane in range(32)],
    ),
    "warp": ("mov.u32 %r3, %r2; bar.warp.sync -1;", COME),
    "named, that do not wait": (
        "and.b32 %r4, %r1, 16; mov.u32 %r5, 65535; shl.b32 %r5, %r5, %r4; shfl.sync.bfly.b32 %r3, %r2, 8, 31, %r5;",
        [COME[lane ^ 8] for lane in range(32)],
    ),
    "votes of those named": (
        "and.b32 %r4, %r1, 16; mov.u32 %r5, 65535; shl.b32 %r5, %r5, %r4; setp.ge.u32 %p2, %r2, 100;"
        "vote.sync.ballot.b32 %r3, %p2, %r5;",
        [0] * 16 + [0xFFF00000] * 16,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("what", "wanted"), MEETINGS.values(), ids=MEETINGS)
def test_lanes_wait_for_others_of_their_warp(what, wanted):
    assert run(SECOND_WAY.replace("WHAT", what), np.zeros(32, np.uint32)).tolist() == wanted


def test_lanes_do_not_wait_for_those_that_are_done():
    """Who is done when they come, and who is done later."""
    for early in ("bra $LATER", "bra $EXIT"):
        body = f"""
            setp.ge.u32 %p1, %r1, 16;
            @%p1 {early};
            $EXIT:
            @%p1 ret;
            shfl.sync.bfly.b32 %r3, %r1, 8, 31, -1;
            st.global.u32 [%rd2], %r3;
            $LATER:
        """
        found = run(body, np.full(32, 77, np.uint32))
        assert found.tolist() == [lane ^ 8 for lane in range(16)] + [77] * 16


def test_what_a_function_returns():
    """Functions may call themselves."""
    factorial = """
    .func (.param .b32 func_retval0) factorial(.param .b32 factorial_param_0)
    {
        .reg .pred %p<2>; .reg .b32 %r<6>;
        ld.param.u32 %r1, [factorial_param_0];
        mov.u32 %r4, 1;
        setp.lt.u32 %p1, %r1, 2;
        @%p1 bra $DONE;
        sub.s32 %r2, %r1, 1;
        { .param .b32 param0; st.param.b32 [param0+0], %r2; .param .b32 retval0;
        call.uni (retval0), factorial, (param0);
        ld.param.b32 %r3, [retval0+0]; }
        mul.lo.s32 %r4, %r1, %r3;
        $DONE:
        st.param.b32 [func_retval0+0], %r4;
        ret;
    }
    """
    body = """
        and.b32 %r2, %r1, 7;
        { .param .b32 param0; st.param.b32 [param0+0], %r2; .param .b32 retval0;
        call.uni (retval0), factorial, (param0);
        ld.param.b32 %r3, [retval0+0]; }
        st.global.u32 [%rd2], %r3;
    """
    found = run(body, np.zeros(32, np.uint32), before=factorial)
    assert found.tolist() == [1, 1, 2, 6, 24, 120, 720, 5040] * 4


COPY = """
    .reg .pred done;
    mov.u32 %r2, 128;  // the barrier, behind what is copied
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra $WAIT;
    mbarrier.init.shared::cta.b64 [%r2], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], BYTES;
    mov.u32 %r4, 0;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd1], 128, [%r2];
    $WAIT:
    bar.sync 0;
    {
    .reg .pred done;
    AGAIN:
    mbarrier.try_wait.parity.shared::cta.b64 done, [%r2], 0;
    @!done bra AGAIN;
    }
    xor.b32 %r5, %r1, 31;
    shl.b32 %r5, %r5, 2;
    ld.shared.u32 %r6, [%r5];
    st.global.u32 [%rd2], %r6;
"""


def test_bulk_copies_turn_barriers():
    assert run(COPY.replace("BYTES", "128"), np.arange(32, dtype=np.uint32)).tolist() == [*range(31, -1, -1)]


FAULTS = {
    "misaligned shared": ("mov.u32 %r2, 2; ld.shared.u32 %r3, [%r2];", "a misaligned address of 4 bytes"),
    "misaligned global": ("ld.global.u32 %r3, [%rd1+2];", "a misaligned address of 4 bytes"),
    "misaligned vector": ("ld.global.v2.u32 {%r3, %r4}, [%rd1+4];", "a misaligned address of 8 bytes"),
    "misaligned copy": ("cp.async.ca.shared.global [%r1], [%rd1], 4, 4;", "a misaligned copy"),
    "misaligned rows": ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r1];", "a misaligned address of 16 bytes"),
    "past shared memory": ("st.shared.u32 [256], %r1;", "shared addresses 256 to 256 of 256 bytes"),
    "past a cluster": (
        "mov.u32 %r2, 0; mapa.shared::cluster.u32 %r3, %r2, 3; ld.shared::cluster.u32 %r4, [%r3];",
        "block 3 of a cluster of 1",
    ),
    "past a tensor": ("st.global.u32 [%rd1+256], %r1;", "is in no tensor of the launch"),
    "before a tensor": ("ld.global.u32 %r3, [%rd1+-4];", "is in no tensor of the launch"),
    "null": ("mov.u64 %rd3, 0; ld.global.u32 %r3, [%rd3];", "address 0x0 is in no tensor of the launch"),
    "a part of a warp": (
        "setp.lt.u32 %p1, %r1, 5; @%p1 movmatrix.sync.aligned.m8n8.trans.b16 %r3, %r1;", "a part of a warp",
    ),
    "lanes elsewhere": (
        "setp.lt.u32 %p1, %r1, 5; @%p1 shfl.sync.bfly.b32 %r3, %r1, 8, 31, -1;", "that are elsewhere",
    ),
    "lanes that are not named": ("shfl.sync.bfly.b32 %r3, %r1, 8, 31, 255;", "that they do not name"),
    "a part of a reduction": ("redux.sync.max.u32 %r3, %r1, 255;", "a part of a warp"),
    "lanes that wait for each other in two places": (
        "setp.lt.u32 %p1, %r1, 5; @%p1 bra $HERE; shfl.sync.bfly.b32 %r3, %r1, 8, 31, -1; bra $DONE; $HERE: "
        "vote.sync.any.pred %p2, %p1, -1; $DONE:",
        "threads wait for each other: 27 at shfl.sync.* 5 at vote.sync",
    ),
    "a barrier that some never reach": (
        "setp.lt.u32 %p1, %r1, 5; @%p1 bra $HERE; bar.sync 1, 32; $HERE: bar.sync 2, 32;",
        "threads wait for each other: 27 at bar.sync 1, 32; 5 at bar.sync 2, 32",
    ),
    "a warp that some leave for another place": (
        "setp.lt.u32 %p1, %r1, 5; @%p1 bra $HERE; bar.warp.sync -1; $HERE: bar.sync 2, 32;",
        "threads wait for each other: 27 at bar.warp.sync -1; 5 at bar.sync 2, 32|5 at .*27 at",
    ),
    "products of a part of a warp": (
        "setp.lt.u32 %p1, %r1, 5; @%p1 wgmma.fence.sync.aligned;", "a part of a warp",
    ),
    "bytes that never come": (COPY.replace("BYTES", "256"), "threads wait for each other: 32 at"),
    "no such barrier": ("mov.u32 %r2, 0; mbarrier.arrive.shared::cta.b64 _, [%r2];", "no barrier at 0"),
    "no end": ("$HERE: bra $HERE;", "a loop without an end"),
    "an unknown instruction": ("sad.u32 %r3, %r1, %r1, %r1;", "sad.u32 .*: an unknown instruction"),
    "an unknown way": ("add.rp.f32 %f1, %f1, %f1;", "add.rp.f32 .*: an unknown instruction"),
    "an unknown register": ("add.s32 %r3, %q1, %r1;", "no operand %q1"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "fault"), FAULTS.values(), ids=FAULTS)
def test_faults(body, fault, monkeypatch):
    monkeypatch.setattr("ptx_machine.MOST_STEPS", 1000)
    with pytest.raises(Fault, match=fault):
        run(body, np.zeros(64, np.uint32))


def test_faults_of_launches():
    with pytest.raises(Fault, match="no whole warps"):
        run("", np.zeros(1), threads=33)
    with pytest.raises(Fault, match="no kernel other"):
        Machine(HEAD, "other")
    with pytest.raises(Fault, match="is in no tensor"):
        run("ld.global.u32 %r3, [%rd1];", np.zeros(1), memory=[])
