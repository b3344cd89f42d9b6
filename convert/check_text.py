"""Text for comparing a converted model with its reference: prose, numbers, code and other scripts."""

CHECK_TEXT = """\
The harbour of a small town wakes before its people do. At four in the morning the first boats come back with their
lights still burning, and gulls that slept on the roofs of the warehouses begin to argue over what the crews throw away.
By six the ice plant is running; by seven, three lorries stand in a row on the quay, their engines off to save fuel, and
the drivers drink tea from the same dented pot that their fathers used. Nobody here would call it picturesque. The work
is cold, it pays by the kilogram, and a bad week in March can undo a good one in February.

A visitor once asked the harbour master how he knew when a storm was coming. He pointed at the barometer, then at the
sky, and finally at an old dog asleep beside the door. "When the first two disagree," he said, "I ask the third." In
1987 the dog was right and the barometer was not: 14 boats stayed in port, and the wind reached 121 km/h that night. In
2004 it was the other way round, which cost the town about 38,500 euros in lost catch and one broken window.

Measuring the sea is mostly a matter of patience. Tides are sums of regular motions: the moon's principal term repeats
every 12.4206 hours, the sun's every 12 hours, and their beat gives spring and neap tides roughly every 14.77 days.
Given a year of hourly heights, a least-squares fit of 37 such terms predicts the next year to within a few centimetres,
except when the weather interferes. The residual, what remains after the fit, is therefore the interesting part.

def residual(heights, hours, periods):
    # design matrix: one cosine and one sine per period, and a constant
    columns = [[1.0] * len(hours)]
    for period in periods:
        angle = [2 * 3.141592653589793 * t / period for t in hours]
        columns += [[cos(a) for a in angle], [sin(a) for a in angle]]
    weights = solve(columns, heights)
    return [h - sum(w * c[i] for w, c in zip(weights, columns)) for i, h in enumerate(heights)]

| station | mean (m) | range (m) | gaps |
|---------|---------:|----------:|-----:|
| North   |    2.413 |      4.87 |   12 |
| South   |    2.398 |      4.91 |    0 |

Names travel further than boats. The same fish is bacalhau in Lisbon, cabillaud in Boulogne, Kabeljau in Bremerhaven,
torsk in Ålesund, треска in Murmansk and 鱈 in Hakodate; the label on the box says Gadus morhua, so that nobody has to
argue. Prices are quoted per box of 25 kg, in €, £ or kr, and whoever forgets which one is meant learns it only once.

Questions to answer before leaving port: Is the radio charged? Who knows where you are going? When will you be back, and
what should they do if you aren't? Write the answers down, leave them on the board, and don't change your mind at sea.
"""
