"""What the pictures of the benchmarks begin with."""


def begun(width: int, height: int) -> list[str]:
    """The first lines of a picture on white, in pixels; `</svg>` ends it."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="13" fill="#55606b">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
