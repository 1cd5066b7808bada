"""A Timeline, rendered: text, HTML, SVG, Perfetto JSON; and the same program on growing worlds."""
