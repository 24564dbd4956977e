"""Claims on the picture of time against cost."""

from xml.etree import ElementTree

from tailrace.report.front import Point, front_svg

SVG = "{http://www.w3.org/2000/svg}"


def test_every_plan_has_a_point_and_a_line_joins_those_of_the_front() -> None:
    points = [
        Point(seconds=10, usd=300, label="16+16", is_best=True, on_front=True),
        Point(seconds=20, usd=200, label="4+4", on_front=True),
        Point(seconds=25, usd=400, label="<8>"),
    ]
    root = ElementTree.fromstring(front_svg(points, title="a & b"))
    circles = root.findall(f"{SVG}circle")
    assert len(circles) == 3
    assert [circle.find(f"{SVG}title").text for circle in circles] == ["16+16", "4+4", "<8>"]  # type: ignore[union-attr]
    (line,) = root.findall(f"{SVG}polyline")
    assert len(line.attrib["points"].split()) == 2
    across = [float(circle.attrib["cx"]) for circle in circles]
    assert across == sorted(across)
