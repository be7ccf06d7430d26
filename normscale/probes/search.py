"""Which event of a bad pass is to blame: what would happen with finite numbers in its place?

A pass is run again with some events mended. The rules, in this order; `first` is the first event that is no doubt.

1. Doubts before `first` (tensors with -Inf alone, which may be masks; all of them where the loss is finite): with all
   of them mended, is `first` gone, or does it come later? Then the first doubt whose mending brings that about, with
   those before it, is to blame; it is found by halving. (So a mask that leaves a row nothing, of which a softmax makes
   NaN, is named, and rightly.)
2. Else `first` itself is mended. Where the pass is finite then, or goes wrong elsewhere or otherwise, it is to blame.
   Where the next event is left exactly as it was, `first` had no part in that: the next one takes its place. One that
   cannot be mended, as the loss or a gradient, is to blame when its turn comes.
3. Where some were passed over and the last mend brought a finite pass, one more pass mends that one alone: if it is not
   finite, the first that was passed over had its own part, and is to blame.
4. A parameter or buffer of the module that is not finite is the cause where the event is gone in a pass with it mended;
   of several, the first. What of a parameter this rank has only for its calls cannot be mended: it is believed.

A plain fault costs one pass more, one behind masks two.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from normscale.probes.culprit import Culprit
from normscale.probes.events import Events, mark_of
from normscale.probes.mend import Mends, Place
from normscale.probes.watch import Unsound, Watch

MOST_PASSED_OVER = 16

Search = Generator[Mends, Watch, Culprit | None]


def search(watch: Watch) -> Search:
    """Yields what to mend in another pass of a bad micro-batch, is sent that pass, and returns the culprit at last."""
    first = watch.events.first
    if first is None:  # what failed shows in no hook that worked
        return None
    culprit = yield from _with_a_part(watch)
    culprit = yield from _explained(watch, culprit)
    culprit = watch.propagated(culprit)
    return culprit.noted(f"a hook failed ({watch.trouble})") if watch.trouble else culprit


def _with_a_part(watch: Watch) -> Generator[Mends, Watch, Culprit]:
    events, over = watch.events, dict[Place, Culprit]()
    assert events.first is not None
    first = events.first
    while True:
        if events.doubts:
            mask = yield from _doubt(events, first, over)
            if mask is not None:
                return mask.noted("with finite numbers in its place what follows is finite")
        place = events.place_of(first)
        if place is None or len(over) == MOST_PASSED_OVER:
            break
        again = yield Mends(frozenset([*over, place]))
        following = again.events.first
        stays = following is not None and again.events.place_of(following) in (place, *over)  # no mend took
        if not again.failed or following is None or stays or not _same(events, following):
            if over and not again.failed:
                alone = yield Mends(frozenset([place]))
                if alone.failed:
                    return next(iter(over.values()))
            break
        over[place] = first
        events, first = again.events, following
    if over:
        passed = list(dict.fromkeys(f"{event.tensor} of {event.where()}" for event in over.values()))
        more = f" and {len(passed) - 1} more" if len(passed) > 1 else ""
        return first.noted(f"what was not finite before it, in {passed[0]}{more}, had no part in it")
    return first


def _doubt(events: Events, first: Culprit, over: dict[Place, Culprit]) -> Generator[Mends, Watch, Culprit | None]:
    """Returns the doubt without which `first` would not be where it is, if there is one."""
    places = list(events.doubts)

    def had_part(again: Watch) -> bool:
        return not again.failed or again.events.first is None or again.events.first.order > first.order

    def mends(some: Sequence[Place]) -> Mends:
        return Mends(frozenset([*over, *some]))

    if not had_part((yield mends(places))):
        return None
    count = yield from _fewest(len(places), lambda n: mends(places[:n]), had_part)
    return events.doubts[places[count - 1]]


def _explained(watch: Watch, culprit: Culprit) -> Generator[Mends, Watch, Culprit]:
    """Returns the parameter or buffer that explains an event, else the event."""
    unsound = watch.unsound_of(culprit)
    tried = [one for one in unsound if one.mendable]

    def own(some: Sequence[Unsound]) -> Mends:
        return Mends(own=frozenset(one.name for one in some))

    def there(again: Watch) -> bool:
        return mark_of(culprit) in again.events.seen

    if tried and not there((yield own(tried))):
        # With the rest mended, how many from the first on does it take to bring the event back?
        count = yield from _fewest(len(tried), lambda n: own(tried[n:]), there)
        return _blamed(culprit, tried[count - 1])
    believed = next((one for one in unsound if one.called and not one.mendable), None)
    return culprit if believed is None else _blamed(culprit, believed)


def _fewest(n: int, mends: Callable[[int], Mends], enough: Callable[[Watch], bool]) -> Generator[Mends, Watch, int]:
    """Returns the smallest number from 1 to n that is enough, where n is, by halving."""
    not_yet, count = 0, n
    while count - not_yet > 1:
        middle = (not_yet + count) // 2
        if enough((yield mends(middle))):
            count = middle
        else:
            not_yet = middle
    return count


def _same(events: Events, event: Culprit) -> bool:
    """Tells whether a pass had the same event; the signs of Inf may differ by what was mended."""
    known = events.seen.get(mark_of(event))
    if known is None:
        return False
    return (known.nan, known.pos_inf + known.neg_inf) == (event.nan, event.pos_inf + event.neg_inf)


def _blamed(culprit: Culprit, own: Unsound) -> Culprit:
    note = f"seen in {culprit.tensor}"
    return replace(culprit.with_counts(own.counts), phase="parameter", tensor=own.local, note=note)
