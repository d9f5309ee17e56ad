"""Every rule of the policy pack broken once, by resources that AWS itself would take."""

import json

import pulumi_aws as aws

vpc = aws.ec2.Vpc("vpc", cidr_block="10.0.0.0/16")
public = aws.ec2.Subnet("public", vpc_id=vpc.id, cidr_block="10.0.0.0/24", map_public_ip_on_launch=True)
cluster = aws.ec2.SecurityGroup("cluster", vpc_id=vpc.id)
aws.vpc.SecurityGroupEgressRule("out", security_group_id=cluster.id, ip_protocol="-1", cidr_ipv4="0.0.0.0/0")
aws.vpc.SecurityGroupIngressRule(
    "ssh", security_group_id=cluster.id, ip_protocol="tcp", from_port=22, to_port=22, cidr_ipv4="0.0.0.0/0"
)
everything = {"Effect": "Allow", "Principal": "*", "Action": "*", "Resource": "*"}
aws.ec2.VpcEndpoint(
    "storage",
    vpc_id=vpc.id,
    service_name="com.amazonaws.us-east-1.s3",
    policy=json.dumps({"Version": "2012-10-17", "Statement": [everything]}),
)

near = aws.ec2.PlacementGroup("near", strategy="cluster")
aws.ec2.LaunchTemplate(
    "node",
    instance_type="p5.48xlarge",
    network_interfaces=[
        aws.ec2.LaunchTemplateNetworkInterfaceArgs(
            network_card_index=0, device_index=0, associate_public_ip_address="true", security_groups=[cluster.id]
        ),
        aws.ec2.LaunchTemplateNetworkInterfaceArgs(
            network_card_index=0, device_index=1, interface_type="efa-only", security_groups=[cluster.id]
        ),
    ],
    placement=aws.ec2.LaunchTemplatePlacementArgs(group_name=near.name),
    instance_market_options=aws.ec2.LaunchTemplateInstanceMarketOptionsArgs(market_type="capacity-block"),
    metadata_options=aws.ec2.LaunchTemplateMetadataOptionsArgs(http_tokens="optional", http_put_response_hop_limit=5),
    block_device_mappings=[
        aws.ec2.LaunchTemplateBlockDeviceMappingArgs(
            device_name="/dev/sda1", ebs=aws.ec2.LaunchTemplateBlockDeviceMappingEbsArgs(volume_size=100)
        )
    ],
)
aws.ec2.CapacityBlockReservation(
    "block", capacity_block_offering_id="cbo-0123456789abcdef0", instance_platform="Linux/UNIX"
)

aws.fsx.LustreFileSystem(
    "scratch",
    subnet_ids=public.id,
    security_group_ids=[cluster.id],
    storage_capacity=1200,
    deployment_type="PERSISTENT_2",
    per_unit_storage_throughput=250,
)
aws.s3.Bucket("runs")
aws.sqs.Queue("notices", sqs_managed_sse_enabled=False)
topic = aws.sns.Topic("alarms", kms_master_key_id="alias/aws/sns")
aws.cloudwatch.LogGroup("logs")
aws.ecr.Repository("images")
aws.ec2.Instance("machine", ami="ami-0123456789abcdef0", instance_type="m7i.large", associate_public_ip_address=True)
metrics = aws.amp.Workspace("metrics")
aws.amp.RuleGroupNamespace("rules", workspace_id=metrics.id, data="groups: []")

anyone = {"Effect": "Allow", "Principal": "*", "Action": "sns:Publish", "Resource": "*"}
aws.sns.TopicPolicy("open", arn=topic.arn, policy=json.dumps({"Version": "2012-10-17", "Statement": [anyone]}))
everything = {"Effect": "Allow", "Action": "*", "Resource": "*"}
aws.iam.Policy("admin", policy=json.dumps({"Version": "2012-10-17", "Statement": [everything]}))
