"""Claims on the picture of time against cost."""

from xml.etree import ElementTree

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


def test_axes_have_round_numbers_and_labels_that_would_overlap_are_left_out() -> None:
    near = [Point(seconds=10 + part / 10, usd=300 - part, label=f"{part}+1", on_front=True) for part in range(5)]
    texts = [text.text for text in ElementTree.fromstring(front_svg(near, title="")).findall(f"{SVG}text")]
    assert [text for text in texts if text is not None and text.endswith("+1")] == ["0+1"]
    assert {"0", "5", "10", "100", "200", "300"} <= set(texts)


def test_large_numbers_are_written_out() -> None:
    points = [Point(seconds=2000, usd=123_456, label="8", on_front=True)]
    texts = [text.text for text in ElementTree.fromstring(front_svg(points, title="")).findall(f"{SVG}text")]
    assert {"50,000", "100,000", "1,000"} <= set(texts)
