from broker.messages import Member, MemberState
from weights_sync.members import GONE, SILENT, STRIKES, Blame, at_fault


def member(member_id: str, pid: int = 1) -> Member:
    return Member(
        member_id=member_id,
        role="generator",
        state=MemberState.SERVING,
        policy_version=0,
        incarnation=0,
        host="localhost",
        pid=pid,
    )


def test_who_failed_too_often_is_left_out_until_it_was_gone() -> None:
    blame, one, other = Blame(), member("g1"), member("g2")
    blame.strike(one, "does not answer", times=STRIKES)
    assert blame.candidates([one, other]) == [other]
    blame.keep([one, other])
    assert blame.candidates([one, other]) == [other]
    blame.keep([other])
    assert blame.candidates([one, other]) == [one, other]


def test_who_was_silent_does_not_hold_up_the_others_until_its_time_is_over() -> None:
    blame, one, other = Blame(), member("g1"), member("g2")
    blame.rest(one, until=10.0)
    assert blame.awake([one, other], now=9.0) == [other]
    assert blame.awake([one, other], now=10.0) == [one, other]
    assert blame.awake([one], now=9.0) == [one], "there is nobody to hold up"
    assert blame.awake([member("g1", pid=2), other], now=9.0) == [member("g1", pid=2), other], "another process"


def test_who_lost_a_transfer_by_the_end_of_another_is_not_blamed_for_it() -> None:
    broken = "SyncFailed: broadcast failed: Connection closed by peer"
    assert at_fault({0: broken, 1: GONE, 2: broken, 3: SILENT}) == {1, 3}
    assert at_fault({1: broken, 2: broken}) == {1, 2}


def test_what_went_wrong_before_all_went_well_is_not_told() -> None:
    blame, gone, struck = Blame(), member("g1"), member("g2")
    blame.strike(gone, "is gone")
    blame.strike(struck, "does not answer")
    blame.last["learner"] = "broadcast failed"
    blame.keep([struck])
    assert blame.text() == "g1: is gone; g2: does not answer; learner: broadcast failed"
    blame.settle()
    assert blame.text() == "g2: does not answer"
