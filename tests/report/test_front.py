"""Claims on the picture of time against cost."""

from itertools import combinations
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from tailrace.report.front import Point, front_svg

SVG = "{http://www.w3.org/2000/svg}"


def test_every_plan_has_a_point_and_no_point_is_below_the_border() -> None:
    points = [
        Point(seconds=10, usd=300, label="16+16", is_best=True, on_front=True),
        Point(seconds=20, usd=200, label="4+4", on_front=True),
        Point(seconds=25, usd=400, label="<8>"),
    ]
    root = ElementTree.fromstring(front_svg(points, title="a & b"))
    circles = root.findall(f"{SVG}circle")
    assert len(circles) == 3
    across = {circle.find(f"{SVG}title").text: float(circle.attrib["cx"]) for circle in circles}  # type: ignore[union-attr]
    assert across["16+16"] < across["4+4"] < across["<8>"]
    (line,) = root.findall(f"{SVG}polyline")
    first, corner, last = (tuple(map(float, place.split(","))) for place in line.attrib["points"].split())
    assert corner == (last[0], first[1])


def test_axes_have_round_numbers_and_labels_without_room_are_left_out() -> None:
    near = [Point(seconds=10 + part / 10, usd=300 - part, label=f"{part}+1", on_front=True) for part in range(5)]
    texts = [text.text for text in ElementTree.fromstring(front_svg(near, title="")).findall(f"{SVG}text")]
    assert [text for text in texts if text is not None and text.endswith("+1")] == ["0+1", "1+1", "4+1"]
    assert {"0", "5", "10", "100", "200", "300"} <= set(texts)


@given(st.lists(st.tuples(st.floats(5, 50), st.floats(100, 900)), min_size=1, max_size=20, unique=True))
def test_no_label_meets_a_point_of_the_border_or_another_label(places: list[tuple[float, float]]) -> None:
    points = [
        Point(seconds=seconds, usd=usd, label=f"{100 + number}+8", on_front=number % 3 > 0, is_best=number == 0)
        for number, (seconds, usd) in enumerate(places)
    ]
    root = ElementTree.fromstring(front_svg(points, title=""))
    texts = [text for text in root.findall(f"{SVG}text") if (text.text or "").endswith("+8")]
    labels = [(float(text.attrib["x"]), float(text.attrib["y"]), text.text or "") for text in texts]
    boxes = [(x, y - 11, x + 7 * len(text), y + 3) for x, y, text in labels]
    assert all(left >= 0 and right <= 640 for left, _, right, _ in boxes)
    assert not any(meet(one, other) for one, other in combinations(boxes, 2))
    by_label = {point.label: point for point in points}
    for circle in root.findall(f"{SVG}circle"):
        point = by_label[circle.find(f"{SVG}title").text]  # type: ignore[union-attr,index]
        if point.on_front or point.is_best:
            x, y = float(circle.attrib["cx"]), float(circle.attrib["cy"])
            assert not any(meet((x - 3.9, y - 3.9, x + 3.9, y + 3.9), box) for box in boxes)


def meet(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    rounding = 0.11  # of the numbers in the picture
    return all(one[side] + rounding < other[side + 2] and other[side] + rounding < one[side + 2] for side in (0, 1))


def test_large_numbers_are_written_out() -> None:
    points = [Point(seconds=2000, usd=123_456, label="8", on_front=True)]
    texts = [text.text for text in ElementTree.fromstring(front_svg(points, title="")).findall(f"{SVG}text")]
    assert {"50,000", "100,000", "1,000"} <= set(texts)
